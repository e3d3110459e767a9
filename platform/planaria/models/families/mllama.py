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
    """One picture of one tile per row; the other tiles are padding."""

    tiles: int
    ratio: int

    def __call__(
        self,
        pixels_N3SS: NDArray[np.float32],
        has_image: Sequence[bool],
        mask_BL: NDArray[np.int64],
        placeholders_BL: NDArray[np.bool_],
    ) -> Arrays:
        """Every row has a picture, be it an empty one: transformers lets a row of text in a batch with pictures
        attend to padding, but skips these layers in a batch of text, so that a row would mean different things."""
        rows, length = mask_BL.shape
        pixels = np.zeros((rows, 1, self.tiles, *pixels_N3SS.shape[1:]), dtype=np.float32)
        ratios = np.zeros((rows, 1), dtype=np.int64)
        seen_BLMT = np.zeros((rows, length, 1, self.tiles), dtype=np.int64)
        tile_mask = np.zeros((rows, 1, self.tiles), dtype=np.int64)
        tile_mask[:, :, 0] = 1
        pictures = iter(pixels_N3SS)
        for row, one in enumerate(has_image):
            if one:
                pixels[row, 0, 0] = next(pictures)
                ratios[row, 0] = self.ratio
                seen_BLMT[row, :, 0, 0] = mask_BL[row]
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
