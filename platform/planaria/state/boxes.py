"""Boxes: axis-aligned regions of a tensor, and their arithmetic.

All state is addressed by the box of the *global* tensor that it fills, never by the rank that held
it, so a layout is nothing but a set of boxes and resharding is intersection. Pure integers: no torch.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class BoxError(ValueError):
    """A box or a split that cannot exist."""


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The region ``offset[d] <= i < offset[d] + shape[d]`` for every dim ``d``.

    A scalar (0-d) tensor has exactly one box, ``Box((), ())``, with one element. A box with a zero
    in its shape is *empty*: that is what a rank holds when FSDP2 has fewer rows than ranks.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape):
            raise BoxError(f"offset {self.offset} and shape {self.shape} have different numbers of dims")
        # There are many boxes: `min` costs several times as much where it is given a default.
        if self.offset and (min(self.offset) < 0 or min(self.shape) < 0):
            raise BoxError(f"offset {self.offset} and shape {self.shape} must not be negative")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box that fills a tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def stop(self) -> tuple[int, ...]:
        """First index past the box on every dim."""
        return tuple(map(operator.add, self.offset, self.shape))

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def empty(self) -> bool:
        """Whether the box has no element."""
        return 0 in self.shape

    def contains(self, other: Box) -> bool:
        """Whether every index of ``other``, its corners included, lies in this box."""
        self._same_dims(other)
        for start, size, other_start, other_size in zip(
            self.offset, self.shape, other.offset, other.shape, strict=True
        ):
            if other_start < start or other_start + other_size > start + size:
                return False
        return True

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether the box lies in a tensor of ``shape``."""
        if len(shape) != len(self.shape):
            return False
        return all(start + size <= full for start, size, full in zip(self.offset, self.shape, shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common region; ``None`` where there is no common element."""
        self._same_dims(other)
        offset: list[int] = []
        shape: list[int] = []
        for mine, my_size, theirs, their_size in zip(self.offset, self.shape, other.offset, other.shape, strict=True):
            start = mine if mine > theirs else theirs
            stop = min(mine + my_size, theirs + their_size)
            if start >= stop:
                return None
            offset.append(start)
            shape.append(stop - start)
        return Box(tuple(offset), tuple(shape))

    def relative_to(self, other: Box) -> tuple[slice, ...]:
        """Slices that select this box from an array that holds ``other``.

        Raises:
            BoxError: this box is not inside ``other``.
        """
        if not other.contains(self):
            raise BoxError(f"{self} is not inside {other}")
        return tuple(
            slice(start - base, start - base + size)
            for start, base, size in zip(self.offset, other.offset, self.shape, strict=True)
        )

    def run_in(self, other: Box) -> int | None:
        """Where this box, which lies in ``other``, begins in the flattened array that holds ``other``, if its elements
        follow one another there without a gap; else ``None``."""
        start, rows = 0, 1
        for mine, size, base, full in zip(self.offset, self.shape, other.offset, other.shape, strict=True):
            if size != full and rows != 1:
                return None
            start, rows = start * full + mine - base, rows * size
        return start

    def within(self, parent: Box) -> Box:
        """Translate this box from the coordinates of ``parent`` to those of the global tensor.

        Nested sharding composes so: the rows that FSDP2 cuts from a tensor-parallel slice are
        ``shard_rows(tp.shape, ...).within(tp)``.

        Raises:
            BoxError: this box exceeds the shape of ``parent``.
        """
        if not self.fits(parent.shape):
            raise BoxError(f"{self} exceeds the shape {parent.shape} of its parent")
        return Box(tuple(start + base for start, base in zip(self.offset, parent.offset, strict=True)), self.shape)

    def subtract(self, cut: Box) -> list[Box]:
        """What is left of this box without ``cut``: at most 2N disjoint boxes."""
        common = self.intersect(cut)
        if common is None:
            return [] if self.empty else [self]
        if common == self:
            return []
        rest: list[Box] = []
        offset, shape = list(self.offset), list(self.shape)
        for dim, (start, stop) in enumerate(zip(common.offset, common.stop, strict=True)):
            for low, high in ((offset[dim], start), (stop, offset[dim] + shape[dim])):
                if low < high:
                    rest.append(
                        Box((*offset[:dim], low, *offset[dim + 1 :]), (*shape[:dim], high - low, *shape[dim + 1 :]))
                    )
            offset[dim], shape[dim] = start, stop - start
        return rest

    def __str__(self) -> str:
        return "[" + ",".join(f"{start}:{stop}" for start, stop in zip(self.offset, self.stop, strict=True)) + "]"

    def _same_dims(self, other: Box) -> None:
        if len(self.shape) != len(other.shape):
            raise BoxError(f"{self} and {other} have different numbers of dims")


def shard_rows(global_shape: Sequence[int], index: int, count: int) -> Box:
    """Shard ``index`` of ``count`` along dim 0, cut as ``torch.chunk`` and FSDP2 cut it.

    Every shard has ``ceil(rows / count)`` rows until they run out; trailing shards are smaller or empty.
    """
    _check_split(index, count)
    if not global_shape:
        raise BoxError("a scalar has no rows to shard; hold it replicated")
    rows = global_shape[0]
    size = -(-rows // count)
    start, stop = min(index * size, rows), min((index + 1) * size, rows)
    return Box((start,) + (0,) * (len(global_shape) - 1), (stop - start, *global_shape[1:]))


def split_dim(global_shape: Sequence[int], dim: int, index: int, count: int) -> Box:
    """Part ``index`` of ``count`` equal parts along ``dim``, as tensor parallelism splits it."""
    _check_split(index, count)
    if not -len(global_shape) <= dim < len(global_shape):
        raise BoxError(f"dim {dim} does not exist in a tensor of shape {tuple(global_shape)}")
    dim %= len(global_shape)
    size, rest = divmod(global_shape[dim], count)
    if rest:
        raise BoxError(f"dim {dim} of shape {tuple(global_shape)} is not divisible by {count}")
    offset, shape = [0] * len(global_shape), list(global_shape)
    offset[dim], shape[dim] = index * size, size
    return Box(tuple(offset), tuple(shape))


def flat_range_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The elements ``start <= i < stop`` of the flattened tensor, as disjoint boxes in that order.

    A ZeRO partition is such a range. Each box is one run of the range, which :meth:`Box.run_in` places; there are at
    most 2N - 1 of them in N dims (one for a scalar): towards either end of the range one box per dim, and one between.

    Raises:
        BoxError: the range exceeds the tensor.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise BoxError(f"elements {start}:{stop} exceed a tensor of shape {tuple(shape)}")
    if start == stop:
        return []
    if not shape:
        return [Box((), ())]
    size = math.prod(shape[1:])
    first, low = divmod(start, size)
    last, high = divmod(stop, size)

    def inside(row: int, begin: int, end: int) -> list[Box]:
        return [Box((row, *box.offset), (1, *box.shape)) for box in flat_range_boxes(shape[1:], begin, end)]

    if first == last:
        return inside(first, low, high)
    boxes: list[Box] = []
    if low:
        boxes += inside(first, low, size)
        first += 1
    if first < last:
        boxes.append(Box((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])))
    return boxes + inside(last, 0, high)


def uncovered(target: Box, pieces: Iterable[Box]) -> list[Box]:
    """The exact part of ``target`` that no piece fills, as disjoint boxes; empty when it is covered."""
    rest = [] if target.empty else [target]
    for piece in pieces:
        if not rest:
            break
        rest = [left for box in rest for left in box.subtract(piece)]
    return rest


def _check_split(index: int, count: int) -> None:
    if count < 1 or not 0 <= index < count:
        raise BoxError(f"part {index} of {count} does not exist")
