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
from planaria.state.dtypes import dtype_of
from planaria.state.shard import bytes_of

_LONG_ROW = 1 << 22
"""Bytes of a row of which a part is wanted, from which on its parts are read one by one."""


class Scratch:
    """Memory to be used again and again: fresh memory costs a page fault every few KiB."""

    def __init__(self) -> None:
        self._held = torch.empty(0, dtype=torch.uint8)

    def array(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An array in it, which is valid until the next call."""
        nbytes = math.prod(shape) * dtype.itemsize
        if len(self._held) < nbytes:
            self._held = torch.empty(nbytes, dtype=torch.uint8)
        return self._held[:nbytes].view(dtype).view(shape)


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
        stream = self.source.stream(self.start)
        stream.fill(self.buffer)
        stream.finish()


@dataclass(frozen=True, slots=True)
class Rows:
    """Some columns of consecutive rows, which are read whole, a few at a time, and copied while they are in cache."""

    source: SliceBytes
    start: int
    """First byte of the first row in the slice."""
    row_shape: tuple[int, ...]
    columns: tuple[slice, ...]
    targets: Sequence[np.ndarray]
    """Where the wanted part of so many rows each goes, as integers of any strides, the first with the most rows. NumPy
    copies cut rows twice as fast as torch."""

    def fetch(self, scratch: Scratch) -> None:
        """Read them; see :meth:`Run.fetch`."""
        rows = scratch.array((len(self.targets[0]), *self.row_shape), dtype_of(self.source.item.dtype))
        raw, wanted = bytes_of(rows), _bits(rows)[(slice(None), *self.columns)]
        row_bytes = len(raw) // len(rows)
        stream = self.source.stream(self.start)
        for target in self.targets:
            stream.fill(raw[: len(target) * row_bytes])
            target[...] = wanted[: len(target)]
        stream.finish()


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
        pieces = target.split(max(1, 2 * source.chunk // row_bytes))
        yield Rows(source, first, row_shape, columns, [_bits(piece) for piece in pieces])


def _bits(tensor: torch.Tensor) -> np.ndarray:
    """The same memory as integers of the same size."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits: np.ndarray = tensor.view(sizes[tensor.itemsize]).numpy()
    return bits
