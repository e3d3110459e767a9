"""SmolVLM and Idefics3: a SigLIP-like tower, a pixel shuffle that merges neighbouring patches, a Llama-like decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planaria.models.families.family import HALVES, Arrays, Family, Pictures


def _pack(
    pixels_N3SS: NDArray[np.float32],
    counts: Sequence[int],
    mask_BL: NDArray[np.int64],
    placeholders_BL: NDArray[np.bool_],
) -> Arrays:
    """One picture per entry: the model counts pictures by ``[batch, pictures]``, but only joins them again.

    A picture that is zero everywhere the model takes for padding and drops, while its placeholders stay; so none is.
    """
    pixels_N13SS = pixels_N3SS[:, None]
    if blank := [index for index, picture in enumerate(pixels_N3SS) if not picture.any()]:
        pixels_N13SS = pixels_N13SS.copy()
        pixels_N13SS[blank, 0, 0, 0, 0] = np.finfo(np.float32).tiny
    side = pixels_N3SS.shape[-1]
    return {
        "pixel_values": pixels_N13SS,
        "pixel_attention_mask": np.ones((len(pixels_N3SS), 1, side, side), dtype=np.bool_),
    }


def _pictures(config: Any) -> Pictures:
    vision = config.vision_config
    tokens = (vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2
    return Pictures(vision.image_size, tokens, *HALVES, _pack)


def _check(config: Any) -> None:
    vision = config.vision_config
    step = vision.patch_size * config.scale_factor
    if vision.image_size % step:
        raise ValueError(
            f"vision_config.image_size: {vision.image_size} is not a multiple of {step}, patch_size times scale_factor"
        )


FAMILY = Family(
    vision=("model.vision_model",),
    projector=("model.connector",),
    pictures=_pictures,
    check=_check,
)
