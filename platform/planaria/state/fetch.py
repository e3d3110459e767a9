"""From the bytes of a slice to a box of its tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from planaria.state.blocks import SliceBytes
from planaria.state.boxes import Box
from planaria.state.dtypes import dtype_of
from planaria.state.shard import bytes_of

_LONG_ROW = 1 << 22
"""Bytes of a row of which a part is wanted, from which on its parts are read one by one."""


def fetch(source: SliceBytes, box: Box, target: torch.Tensor) -> None:
    """Fill ``target`` with the elements of ``box``, which lies in the slice.

    Where the box is one run of bytes in the slice and in memory (shards along dim 0), it is read in place. Else its
    rows are read once, a few at a time, and the wanted columns copied while they are in cache.

    Args:
        target: of shape ``box.shape``, on any device, of any dtype and strides; undefined after an error.

    Raises:
        CheckpointDamaged: the slice is not what was written.
    """
    if not box.empty:
        start = tuple(at - base for at, base in zip(box.offset, source.item.box.offset, strict=True))
        _fetch(source, 0, source.item.box.shape, start, target.detach())


def _fetch(source: SliceBytes, base: int, shape: Sequence[int], start: Sequence[int], target: torch.Tensor) -> None:
    """The same for a box that begins at index ``start`` of the tensor of ``shape`` at byte ``base`` of the slice."""
    dtype = dtype_of(source.item.dtype)
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    first = base + (start[0] * row_bytes if start else 0)
    whole_rows = tuple(target.shape[1:]) == tuple(shape[1:])
    if whole_rows and target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous():
        stream = source.stream(first)
        stream.fill(bytes_of(target))
        stream.finish()
    elif not shape:
        value = torch.empty((), dtype=dtype)
        _fetch(source, base, shape, start, value)
        target.copy_(value)
    elif len(shape) > 1 and (target.shape[0] == 1 or row_bytes >= _LONG_ROW):
        for row in range(target.shape[0]):
            _fetch(source, first + row * row_bytes, shape[1:], start[1:], target[row])
    else:
        _fetch_rows(source, first, row_bytes, tuple(shape[1:]), start[1:], target)


def _fetch_rows(
    source: SliceBytes,
    first: int,
    row_bytes: int,
    row_shape: tuple[int, ...],
    start: Sequence[int],
    target: torch.Tensor,
) -> None:
    count = target.shape[0]
    some = min(count, max(1, source.chunk // row_bytes))
    rows = torch.empty((some, *row_shape), dtype=dtype_of(source.item.dtype))
    part = Box(tuple(start), tuple(target.shape[1:])).relative_to(Box.whole(row_shape))
    raw, wanted = bytes_of(rows), rows[(slice(None), *part)]
    stream = source.stream(first)
    for at in range(0, count, some):
        size = min(some, count - at)
        stream.fill(raw[: size * row_bytes])
        target[at : at + size].copy_(wanted[:size])
    stream.finish()
