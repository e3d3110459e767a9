"""Who reads which part of a global batch, for any number of data-parallel ranks. Pure arithmetic.

No divisibility rule: ranks may get different numbers of samples, but all run the same number of
micro-batches, because every micro-batch is a round of collectives that nobody may miss. A micro-batch
that gets no sample is run with a zero-weight filler.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

Bounds = tuple[int, int]
"""Half-open range [lo, hi) of offsets inside one global batch."""


@dataclass(frozen=True)
class MicroBatchPlan:
    """One global batch, cut for ``len(slices)`` data-parallel ranks."""

    slices: tuple[Bounds, ...]
    """The offsets of each data-parallel rank; contiguous, in rank order."""
    count: int
    """Micro-batches that every rank runs."""

    def pieces(self, dp_rank: int) -> list[Bounds]:
        """The ``count`` micro-batches of one data-parallel rank."""
        return micro_batches(*self.slices[dp_rank], self.count)


def slice_bounds(global_batch: int, dp_size: int) -> list[Bounds]:
    """Contiguous slices of range(global_batch), one per rank; sizes differ by at most one, larger first.

    Raises:
        ValueError: a size is not positive.
    """
    _positive(global_batch=global_batch, dp_size=dp_size)
    return micro_batches(0, global_batch, dp_size)


def micro_batch_plan(global_batch: int, dp_size: int, micro_batch: int) -> MicroBatchPlan:
    """The slices, and the common number of micro-batches of at most ``micro_batch`` samples each.

    Raises:
        ValueError: a size is not positive.
    """
    _positive(micro_batch=micro_batch)
    slices = slice_bounds(global_batch, dp_size)
    largest = max(hi - lo for lo, hi in slices)
    return MicroBatchPlan(tuple(slices), -(-largest // micro_batch))


def micro_batches(lo: int, hi: int, count: int) -> list[Bounds]:
    """``count`` contiguous pieces of [lo, hi), larger first; sizes differ by at most one, some may be empty.

    Raises:
        ValueError: the range runs backwards or ``count`` is not positive.
    """
    _positive(count=count)
    if hi < lo:
        raise ValueError(f"slice [{lo}, {hi}) runs backwards")
    size, larger = divmod(hi - lo, count)
    edges = [lo + i * size + min(i, larger) for i in range(count + 1)]
    return list(itertools.pairwise(edges))


def _positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}={size} must be at least 1")
