"""What is saved: the parameters and both moments of a small decoder, as every layout holds them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from planaria.layout import Layout
from planaria.state.boxes import Box
from planaria.state.holdings import held_box, replicated_axes

KEYS = ("model", "optim/exp_avg", "optim/exp_avg_sq")


@dataclass(frozen=True)
class Global:
    """One tensor of the state; ``tp_dim`` and ``layer`` say how tensor and pipeline parallelism cut it."""

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None
    layer: int
    seed: int


@dataclass(frozen=True)
class Work:
    """A decoder of eight tensors per layer, in float32."""

    layers: int = 8
    hidden: int = 1024
    inner: int = 2816

    def tensors(self) -> list[Global]:
        """All tensors of the state."""
        square, wide = (self.hidden, self.hidden), (self.inner, self.hidden)
        cuts = {
            "attention.q": (square, 0),
            "attention.k": (square, 0),
            "attention.v": (square, 0),
            "attention.o": (square, 1),
            "mlp.gate": (wide, 0),
            "mlp.up": (wide, 0),
            "mlp.down": (wide[::-1], 1),
            "norm": ((self.hidden,), None),
        }
        names = [(key, layer, part) for layer in range(self.layers) for part in cuts for key in KEYS]
        return [
            Global(f"{key}/layers.{layer}.{part}", cuts[part][0], cuts[part][1], layer, seed)
            for seed, (key, layer, part) in enumerate(names)
        ]

    @property
    def nbytes(self) -> int:
        """Size of the whole state."""
        return sum(4 * Box.whole(tensor.shape).numel for tensor in self.tensors())

    def held(self, layout: Layout, rank: int) -> Iterator[tuple[Global, Box, frozenset[str]]]:
        """What ``rank`` holds, and on which axes others hold the same."""
        for tensor in self.tensors():
            stage = tensor.layer * layout.pp // self.layers if layout.pp > 1 else None
            tp_dim = tensor.tp_dim if layout.tp > 1 else None
            box = held_box(tensor.shape, tp_dim, stage, layout, rank)
            if box is not None:
                # Among the ranks of one stage all have the same place on pp.
                yield tensor, box, replicated_axes(tensor.shape, tp_dim, stage)

    def as_json(self) -> str:
        """For another process."""
        return json.dumps(asdict(self))


def values(tensor: Global, box: Box) -> Tensor:
    """The elements of ``box``: bits that tell from which tensor they are and from where in it."""
    at = torch.zeros((), dtype=torch.int32)
    for start, size, full in zip(box.offset, box.shape, tensor.shape, strict=True):
        at = (at * full).unsqueeze(-1) + torch.arange(start, start + size, dtype=torch.int32)
    return (at + 7919 * tensor.seed).view(torch.float32)


def same(found: Tensor, tensor: Global, box: Box) -> bool:
    """Whether these are the elements of ``box``."""
    return torch.equal(found.view(torch.int32), values(tensor, box).view(torch.int32))
