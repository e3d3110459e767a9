"""From the bytes of slices to boxes of tensors: first the plan, then the reading.

What can be worked out beforehand is: a large read empties the caches, and Python that follows one is slow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from planaria.state.blocks import SliceBytes
from planaria.state.boxes import Box
from planaria.state.scratch import Scratch
from planaria.state.shard import bytes_of

_LONG_ROW = 1 << 22
"""Bytes of a row of which a part is wanted, from which on its parts are read one by one."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of bytes, in a slice and in memory, to be read in place."""

    source: SliceBytes
    start: int
    buffer: memoryview

    def fetch(self, scratch: Scratch) -> None:
        """Read it.

        Raises:
            CheckpointDamaged: the slice is not what was written.
        """
        self.source.fill(self.buffer, self.start, scratch.block)


@dataclass(frozen=True, slots=True)
class Rows:
    """Some columns of consecutive rows, which are read whole, a few at a time, and copied while they are in cache."""

    source: SliceBytes
    start: int
    """First byte of the first row in the slice."""
    row_shape: tuple[int, ...]
    columns: tuple[slice, ...]
    target: np.ndarray
    """Where the wanted part of the rows goes, as integers of any strides. NumPy copies cut rows twice as fast as
    torch."""

    def fetch(self, scratch: Scratch) -> None:
        """Read them; see :meth:`Run.fetch`."""
        source, dtype, at = self.source, self.target.dtype, self.start
        row_bytes = math.prod(self.row_shape) * dtype.itemsize
        stop = at + len(self.target) * row_bytes
        raw = scratch.rows(row_bytes + min(source.step, stop - at))
        count = len(raw) // row_bytes
        rows = np.frombuffer(raw, dtype, count * math.prod(self.row_shape)).reshape(count, *self.row_shape)
        wanted = rows[(slice(None), *self.columns)]
        done = left = 0
        while at < stop:
            # Whole blocks, but for the first and the last one. What is left of a row waits for the rest of it.
            until = min(at - at % source.block + source.step, stop)
            source.fill(raw[left : left + until - at], at, scratch.block)
            full, left = divmod(left + until - at, row_bytes)
            self.target[done : done + full] = wanted[:full]
            if full and left:
                raw[:left] = raw[full * row_bytes : full * row_bytes + left]
            done, at = done + full, until


def plan(parts: Iterable[tuple[SliceBytes, Box]], box: Box, out: torch.Tensor) -> Iterator[Run | Rows]:
    """How to fill ``out``, which is to hold ``box``, with parts of it from slices.

    Args:
        out: CPU tensor of the stored dtype and of shape ``box.shape``, of any strides.
    """
    out = out.detach()
    raw = bytes_of(out) if out.is_contiguous() else None
    for source, part in parts:
        first, at = part.run_in(source.item.box), part.run_in(box)
        if raw is not None and first is not None and at is not None:
            size = out.itemsize
            yield Run(source, first * size, raw[at * size : (at + part.numel) * size])
        else:
            start = tuple(mine - base for mine, base in zip(part.offset, source.item.box.offset, strict=True))
            yield from _plan(source, 0, source.item.box.shape, start, out[part.relative_to(box)])


def _plan(
    source: SliceBytes, base: int, shape: Sequence[int], start: Sequence[int], target: torch.Tensor
) -> Iterator[Run | Rows]:
    """The same for all of ``target``: from index ``start`` of the array of ``shape`` at byte ``base`` of the slice."""
    if not shape:
        shape, start, target = (1,), (0,), target.unsqueeze(0)
    row_shape = tuple(shape[1:])
    row_bytes = math.prod(row_shape) * target.itemsize
    first = base + start[0] * row_bytes
    if tuple(target.shape[1:]) == row_shape and target.is_contiguous():
        yield Run(source, first, bytes_of(target))
    elif row_shape and (len(target) == 1 or row_bytes >= _LONG_ROW):
        for at, row in enumerate(target):
            yield from _plan(source, first + at * row_bytes, row_shape, start[1:], row)
    else:
        columns = Box(tuple(start[1:]), tuple(target.shape[1:])).relative_to(Box.whole(row_shape))
        yield Rows(source, first, row_shape, columns, _bits(target))


def _bits(tensor: torch.Tensor) -> np.ndarray:
    """The same memory as integers of the same size."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits: np.ndarray = tensor.view(sizes[tensor.itemsize]).numpy()
    return bits
