"""What the platform must know of a family beyond the rules that all share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planaria.data.collate import Pack

CLIP_STATISTICS = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""(mean, std) per channel of the pictures that CLIP saw."""
HALVES = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
"""(mean, std) that bring pixels to -1..1."""

Arrays = dict[str, NDArray[np.generic]]


def plain(
    pixels_N3SS: NDArray[np.float32],
    counts: Sequence[int],
    mask_BL: NDArray[np.int64],
    placeholders_BL: NDArray[np.bool_],
) -> Arrays:
    """``pixel_values`` as they are: the usual input of a tower for square pictures of one size."""
    return {"pixel_values": pixels_N3SS}


@dataclass(frozen=True)
class Pictures:
    """How pictures enter a model.

    Attributes:
        side: S, to which pictures are cut and resized.
        tokens: placeholder tokens per picture.
        mean: per channel, in 0..1.
        std: per channel.
        pack: from pixels to the arrays of a forward pass. Their first dimension need not be the batch.
    """

    side: int
    tokens: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    pack: Pack = plain


def _one(_: Any) -> int | None:
    return 1


def _no_positions(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {}


def _nothing(_: Any) -> None:
    return None


@dataclass(frozen=True)
class Family:
    """Where the parts of a model are, how pictures enter it, and what the generic rules must know of it.

    Attributes:
        vision: names of the modules that make the vision encoder.
        projector: names of those between it and the decoder; may lie inside ``vision``. The rest is language.
        pictures: from the Hugging Face config.
        check: raises ValueError for a config that cannot work, naming the key.
        freeze_unused: freezes, in a model, what can never get a gradient.
        units: names of layer classes that are units though transformers does not mark them for checkpointing.
        replicate: names of modules inside units that tensor parallelism leaves whole: fused or hard-coded heads.
        whole: counts that therefore need not be divided by tp.
        head_attributes: integer attributes of attention modules that their forward divides heads by.
        splits_sequence: whether activations of the decoder may be sharded along the sequence.
        together: how many of the first decoder layers more than hidden states connects, so that they share a pipeline
            stage; None: all.
        positions: inputs that say where tokens are, from (model, inputs of its forward), for a pipeline stage that
            does not see the tokens.
    """

    vision: tuple[str, ...]
    projector: tuple[str, ...]
    pictures: Callable[[Any], Pictures]
    check: Callable[[Any], None] = _nothing
    freeze_unused: Callable[[Any], None] = _nothing
    units: frozenset[str] = frozenset()
    replicate: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    head_attributes: frozenset[str] = frozenset()
    splits_sequence: bool = True
    together: Callable[[Any], int | None] = _one
    positions: Callable[[Any, Mapping[str, Any]], dict[str, Any]] = _no_positions

    def part_of(self, parameter: str) -> str:
        """``vision``, ``projector`` or ``language``: which part a parameter belongs to."""
        parts: Mapping[str, tuple[str, ...]] = {"projector": self.projector, "vision": self.vision}
        for part, modules in parts.items():
            if any(parameter.startswith(f"{module}.") for module in modules):
                return part
        return "language"
