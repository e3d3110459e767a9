"""Many small tensors added up over the replicas in few messages, uncompressed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from planaria.engine.reduce.protocol import FAR, Setting
from planaria.engine.wire import all_reduce_bytes


def sum_together(tensors: Sequence[Tensor], setting: Setting) -> None:
    """Replace each tensor by its sum over the replicas, the same to the bit on all of them."""
    for batch in _batches(tensors, int(setting.config.bucket_mb * 1e6)):
        flat = torch.cat([tensor.reshape(-1) for tensor in batch])
        dist.all_reduce(flat, group=setting.group)
        setting.wire.add(FAR, all_reduce_bytes(flat.numel() * flat.element_size(), setting.replicas))
        for tensor, part in zip(batch, flat.split([tensor.numel() for tensor in batch]), strict=True):
            tensor.copy_(part.view_as(tensor))


def _batches(tensors: Sequence[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Tensors of one dtype and at most ``limit`` bytes, or one that is larger."""
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        batch: list[Tensor] = []
        size = 0
        for tensor in tensors:
            if tensor.dtype != dtype or not tensor.numel():
                continue
            nbytes = tensor.numel() * tensor.element_size()
            if batch and size + nbytes > limit:
                yield batch
                batch, size = [], 0
            batch.append(tensor)
            size += nbytes
        if batch:
            yield batch
