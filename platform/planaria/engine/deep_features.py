"""Image features that are added behind the first decoder layers (Qwen3-VL's deepstack), where sequences are split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MASK, FEATURES = "visual_pos_masks", "deepstack_visual_embeds"


def own_features(
    kwargs: dict[str, Any], part: Callable[[Tensor], Tensor], enter: Callable[[Tensor], Tensor] = lambda x: x
) -> dict[str, Any]:
    """Arguments of a decoder, with the features of this rank's positions alone.

    The mask [B, L] says where features go; those of all rows and positions stand one after another, [N, H] per layer.

    Args:
        kwargs: the arguments; without such features they stay as they are.
        part: from a tensor [B, L] to this rank's part of it, a view.
        enter: what the features pass through before they are cut, for the sake of their gradient.
    """
    mask_BL, features = kwargs.get(MASK), kwargs.get(FEATURES)
    if mask_BL is None or features is None:
        return kwargs
    own_BL = torch.zeros_like(mask_BL)
    part(own_BL).fill_(True)
    kept_N = own_BL[mask_BL]
    return kwargs | {MASK: part(mask_BL), FEATURES: [enter(x_NH)[kept_N] for x_NH in features]}
