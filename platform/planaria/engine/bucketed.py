"""Many tensors summed in few messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 64 << 20
"""Size of a message: large enough to fill a link, small beside the gradients that it is made from."""


def sum_in_place(tensors: Sequence[Tensor], group: dist.ProcessGroup, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Replace each tensor by its sum over ``group``, the same bits on every rank; collective.

    All ranks must give tensors of the same shapes and dtypes in the same order.
    """
    for bucket in _buckets(tensors, bucket_bytes):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.all_reduce(flat, group=group)
        for tensor, summed in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            tensor.copy_(summed.view_as(tensor))


def _buckets(tensors: Sequence[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """The tensors in order, cut where the dtype changes or a bucket would exceed ``limit`` bytes."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (tensor.dtype != bucket[0].dtype or size + tensor.nbytes > limit):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket
