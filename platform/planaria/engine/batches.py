"""A micro-batch as tensors on the engine's device."""

from __future__ import annotations

import torch
from torch import Tensor

from planaria.recipe import MicroBatch


def to_device(batch: MicroBatch, device: torch.device, floats: torch.dtype | None = None) -> dict[str, Tensor]:
    """Its arrays on ``device``; those of floating-point numbers cast to ``floats``, if that is given."""
    # Arrays from the object store are read-only; torch wants writable memory.
    tensors = {key: torch.from_numpy(array.copy()) for key, array in batch.arrays.items()}
    return {
        key: tensor.to(device, floats if tensor.is_floating_point() else None, non_blocking=True)
        for key, tensor in tensors.items()
    }
