"""Mllama (Llama 3.2 Vision): the decoder looks at pictures through cross-attention layers instead of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planaria.models.families.family import CLIP_STATISTICS, Arrays, Family, Pictures


@dataclass(frozen=True)
class _Pack:
    """Pictures of one tile each, as many per row as the row with most of them has; the rest is padding."""

    tiles: int
    ratio: int

    def __call__(
        self,
        pixels_N3SS: NDArray[np.float32],
        counts: Sequence[int],
        mask_BL: NDArray[np.int64],
        placeholders_BL: NDArray[np.bool_],
    ) -> Arrays:
        """Every row has a picture, be it an empty one: transformers lets a row of text in a batch with pictures
        attend to padding, but skips these layers in a batch of text, so that a row would mean different things.

        A picture is seen from its placeholder on: an earlier answer must not look at what is shown later.
        """
        rows, length = mask_BL.shape
        most = max(1, *counts)
        pixels = np.zeros((rows, most, self.tiles, *pixels_N3SS.shape[1:]), dtype=np.float32)
        ratios = np.zeros((rows, most), dtype=np.int64)
        seen_BLMT = np.zeros((rows, length, most, self.tiles), dtype=np.int64)
        tile_mask = np.zeros((rows, most, self.tiles), dtype=np.int64)
        tile_mask[:, :, 0] = 1
        pictures = iter(pixels_N3SS)
        for row, count in enumerate(counts):
            for at, place in enumerate(np.flatnonzero(placeholders_BL[row] & (mask_BL[row] == 1))[:count]):
                pixels[row, at, 0] = next(pictures)
                ratios[row, at] = self.ratio
                seen_BLMT[row, place:, at, 0] = mask_BL[row, place:]
        return {
            "pixel_values": pixels,
            "aspect_ratio_ids": ratios,
            "aspect_ratio_mask": tile_mask,
            "cross_attention_mask": seen_BLMT,
        }


def _pictures(config: Any) -> Pictures:
    vision = config.vision_config
    pack = _Pack(vision.max_num_tiles, 1 + vision.supported_aspect_ratios.index([1, 1]))
    return Pictures(vision.image_size, 1, *CLIP_STATISTICS, pack)


def _check(config: Any) -> None:
    vision = config.vision_config
    if vision.image_size % vision.patch_size:
        raise ValueError(
            f"vision_config.image_size: {vision.image_size} is not a multiple of patch_size {vision.patch_size}"
        )
    if [1, 1] not in vision.supported_aspect_ratios:
        raise ValueError("vision_config.supported_aspect_ratios: lacks [1, 1], the square pictures of this platform")
    width = vision.hidden_size * (1 + len(vision.intermediate_layers_indices))
    if vision.vision_output_dim != width:
        raise ValueError(
            f"vision_config.vision_output_dim: {vision.vision_output_dim}, but hidden_size times one more than "
            f"intermediate_layers_indices is {width}"
        )


def _all(_: Any) -> None:
    """Layers all along the decoder attend to what the tower yields."""
    return None


FAMILY = Family(
    vision=("model.vision_model",),
    projector=("model.multi_modal_projector",),
    pictures=_pictures,
    check=_check,
    units=frozenset({"MllamaVisionEncoderLayer"}),
    head_attributes=frozenset({"num_heads", "num_key_value_heads"}),
    splits_sequence=False,  # what the MLP of a cross-attention layer yields is multiplied with a mask of all positions
    together=_all,
)
