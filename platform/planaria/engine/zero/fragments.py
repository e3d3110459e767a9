"""Where the state of this rank lies: flat ranges of global tensors, inside DeepSpeed's flat buffers.

ZeRO (arXiv:1910.02054) cuts flattened parameters into one range per rank. A range is at most 2N - 1 boxes of an N-D
tensor, and each of these is one run of memory; so state that DeepSpeed holds is told, saved and restored in the very
index that all engines share.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from planaria.layout import AXES
from planaria.state.boxes import Box, flat_range_boxes

PARTITIONED = frozenset(AXES) - {"dp_shard", "dp_replicate"}
"""Axes over which a partition is replicated: every data-parallel rank has another one."""
WHOLE = frozenset(AXES)
"""Axes over which a tensor is replicated that every rank holds whole."""


@dataclass(frozen=True)
class Fragment:
    """The elements ``start <= i < stop`` of one flattened parameter."""

    name: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    start: int
    stop: int
    group: int
    """Index of the flat buffer that holds the elements."""
    offset: int
    """Where they begin in it."""
    axes: Collection[str]

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...], group: int) -> Fragment:
        """All of a parameter, in a buffer of its own, on every rank."""
        return cls(name, shape, 0, math.prod(shape), group, 0, WHOLE)

    @cached_property
    def boxes(self) -> list[tuple[Box, int]]:
        """The boxes that the range fills, and where each begins in the buffer."""
        whole = Box.whole(self.shape)
        found = []
        for box in flat_range_boxes(self.shape, self.start, self.stop):
            run = box.run_in(whole)
            assert run is not None  # each box of a flat range is one run of it
            found.append((box, self.offset + run - self.start))
        return found

    def views(self, buffer: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """The boxes as tensors that share the memory of ``buffer``, which is laid out like the fragment's own."""
        for box, begin in self.boxes:
            yield box, buffer[begin : begin + box.numel].view(box.shape)


def share(numel: int, rank: int, world: int) -> tuple[int, int]:
    """(first element, one past the last) of the equal share of ``rank``; trailing ranks may get fewer or none."""
    size = -(-numel // world)
    return min(rank * size, numel), min((rank + 1) * size, numel)
