"""A micro-batch as tensors on the engine's device."""

from __future__ import annotations

import torch
from torch import Tensor

from planaria.recipe import MicroBatch, PixelScale


def to_device(batch: MicroBatch, device: torch.device, floats: torch.dtype | None = None) -> dict[str, Tensor]:
    """Its arrays on ``device``, bytes scaled; those of floating-point numbers cast to ``floats``, if that is given."""
    # Arrays from the object store are read-only; torch wants writable memory.
    tensors = {key: torch.from_numpy(array.copy()).to(device, non_blocking=True) for key, array in batch.arrays.items()}
    for key, scale in batch.scales.items():
        tensors[key] = scaled(tensors[key], scale)
    return {
        key: tensor.to(floats) if floats and tensor.is_floating_point() else tensor for key, tensor in tensors.items()
    }


def scaled(bytes_NCHW: Tensor, scale: PixelScale) -> Tensor:
    """float32 [N, channels, height, width] from bytes, to the bit what :func:`planaria.data.images.normalise` makes."""
    mean, std = (torch.tensor(v, device=bytes_NCHW.device)[:, None, None] for v in (scale.mean, scale.std))
    return bytes_NCHW.float().div_(255).sub_(mean).div_(std)
