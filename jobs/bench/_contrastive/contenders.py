"""One forward and backward pass of a contrastive loss, from a rank's own features to their gradients."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LOG_SCALE, BIAS = math.log(10.0), -10.0
LOSSES = ("softmax", "sigmoid")

Pass = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From own image and text features [N, D] to the gradients of the sum of all pairs' losses."""


def planaria(kind: str, mesh: Any, columns: int) -> Pass:
    """Own rows against blocks of all ranks' features."""
    from planaria.engine.row_blocks import RowBlocks
    from planaria.objectives.contrastive import own_rows_loss

    blocks = RowBlocks(mesh, columns)

    def run(image_ND: Tensor, text_ND: Tensor) -> tuple[Tensor, Tensor]:
        found = own_rows_loss(kind, image_ND, text_ND, torch.tensor(LOG_SCALE), torch.tensor(BIAS), blocks)
        return found.image_ND, found.text_ND

    return run


def open_clip(kind: str, module: Any) -> Pass:
    """Its loss with the settings that need least memory and give exact gradients."""
    place = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    if kind == "softmax":
        loss = module.ClipLoss(local_loss=True, gather_with_grad=True, **place)
    else:
        loss = module.SigLipLoss(**place)

    def run(image_ND: Tensor, text_ND: Tensor) -> tuple[Tensor, Tensor]:
        image, text = image_ND.clone().requires_grad_(), text_ND.clone().requires_grad_()
        bias = () if kind == "softmax" else (torch.tensor(BIAS),)
        loss(image, text, torch.tensor(LOG_SCALE).exp(), *bias).backward()
        assert image.grad is not None and text.grad is not None
        # A mean over own pairs, where ours is a sum.
        return image.grad * len(image), text.grad * len(text)

    return run


def open_clip_module() -> Any:
    """open_clip's file of losses, without the rest of the package, which needs torchvision and timm.

    Raises:
        ImportError: it is not installed (``pip install --no-deps open_clip_torch`` is enough).
    """
    package = importlib.util.find_spec("open_clip")
    if package is None or package.origin is None:
        raise ImportError("open_clip is not installed; pip install --no-deps open_clip_torch is enough")
    spec = importlib.util.spec_from_file_location("open_clip_loss", Path(package.origin).with_name("loss.py"))
    if spec is None or spec.loader is None:
        raise ImportError("open_clip has no file loss.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
