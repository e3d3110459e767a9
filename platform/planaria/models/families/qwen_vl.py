"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: a tower for any size of picture, positions in three dimensions (mRoPE)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planaria.models.families.family import CLIP_STATISTICS, HALVES, Arrays, Family, Pictures

TOKENS_PER_SIDE = 8
"""Placeholder tokens along one side of a picture where ``vision_config.image_size`` does not say how large it is."""


@dataclass(frozen=True)
class _Pack:
    """Pictures as rows of flattened patches, neighbours that are merged into one token together."""

    patch: int
    merge: int
    frames: int

    def __call__(
        self,
        pixels_N3SS: NDArray[np.float32],
        counts: Sequence[int],
        mask_BL: NDArray[np.int64],
        placeholders_BL: NDArray[np.bool_],
    ) -> Arrays:
        """``pixel_values`` [patches of all pictures, values of one], ``image_grid_thw`` [N, 3] and the token types.

        Without the token types Qwen2.5-VL would silently number picture tokens like text.
        """
        count, channels, side, _ = pixels_N3SS.shape
        grid = side // self.patch
        blocks = pixels_N3SS.reshape(
            count, channels, grid // self.merge, self.merge, self.patch, grid // self.merge, self.merge, self.patch
        ).transpose(0, 2, 5, 3, 6, 1, 4, 7)
        # A still picture is a film of as many equal frames as the tower takes at once.
        still = np.repeat(blocks[:, :, :, :, :, :, None], self.frames, axis=6)
        return {
            "pixel_values": still.reshape(count * grid * grid, -1),
            "image_grid_thw": np.tile(np.array([1, grid, grid], dtype=np.int64), (count, 1)),
            "mm_token_type_ids": (placeholders_BL & (mask_BL == 1)).astype(np.int64),
        }


def _side(vision: Any) -> int:
    own = getattr(vision, "image_size", None)
    return TOKENS_PER_SIDE * vision.patch_size * vision.spatial_merge_size if own is None else own


def _pictures_for(statistics: tuple[tuple[float, ...], tuple[float, ...]]) -> Any:
    def pictures(config: Any) -> Pictures:
        vision = config.vision_config
        side = _side(vision)
        tokens = (side // (vision.patch_size * vision.spatial_merge_size)) ** 2
        pack = _Pack(vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size)
        return Pictures(side, tokens, *statistics, pack)

    return pictures


def _check(config: Any) -> None:
    vision = config.vision_config
    step = vision.patch_size * vision.spatial_merge_size
    if _side(vision) % step:
        raise ValueError(
            f"vision_config.image_size: {_side(vision)} is not a multiple of {step}, patch_size times "
            "spatial_merge_size"
        )
    width = getattr(vision, "out_hidden_size", vision.hidden_size)
    if width != config.text_config.hidden_size:
        raise ValueError(
            f"vision_config: its merger yields {width} features, but text_config.hidden_size is "
            f"{config.text_config.hidden_size}; make them equal"
        )


def _deepstack(config: Any) -> int:
    """Features of inner tower layers are added behind the first decoder layers, which must know them."""
    return max(1, len(config.vision_config.deepstack_visual_indexes))


def _positions(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Three-dimensional positions; a stage without token ids would number all tokens alike, and say nothing."""
    ids, _ = model.model.get_rope_index(
        inputs["input_ids"],
        mm_token_type_ids=inputs["mm_token_type_ids"],
        image_grid_thw=inputs["image_grid_thw"],
        attention_mask=inputs["attention_mask"],
    )
    return {"position_ids": ids}


_COMMON: dict[str, Any] = {
    "vision": ("model.visual",),
    "check": _check,
    "positions": _positions,
    # One fused matrix for queries, keys and values: its rows cannot be cut like three.
    "replicate": frozenset({"attn"}),
    "whole": frozenset({"vision_config.num_attention_heads"}),
}
QWEN2 = Family(projector=("model.visual.merger",), pictures=_pictures_for(CLIP_STATISTICS), **_COMMON)
QWEN2_5 = QWEN2
QWEN3 = Family(
    projector=("model.visual.merger", "model.visual.deepstack_merger_list"),
    pictures=_pictures_for(HALVES),
    together=_deepstack,
    **_COMMON,
)
