"""Which rank takes which samples of a global batch, so that all have about the same work. Pure.

Ranks wait for one another at the end of every phase, so a step takes as long as its most loaded rank needs for vision
and then for language. The batch itself does not change, and the loss is normalised by the tokens of the whole batch, so
neither does the mathematics.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count


def assign(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Offsets of the samples of each rank, ascending: by the largest differencing method (Karmarkar and Karp, 1982).

    Args:
        costs: of each sample of the global batch, at least 0.
        ranks: among how many.

    Raises:
        ValueError: no rank, or a negative cost.
    """
    if ranks < 1 or any(cost < 0 for cost in costs):
        raise ValueError(
            f"{ranks} ranks and costs from {min(costs, default=0)}; expected at least one, and none below 0"
        )
    # An entry is a way to deal some of the samples into `ranks` heaps. The two that are most uneven are laid together,
    # the heaviest heap of one on the lightest of the other, until one way is left.
    order = count()
    entries: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for offset, cost in enumerate(costs):
        heapq.heappush(entries, (-cost, next(order), [(0.0, [])] * (ranks - 1) + [(float(cost), [offset])]))
    while len(entries) > 1:
        one, other = heapq.heappop(entries)[2], heapq.heappop(entries)[2]
        laid = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(one, reversed(other), strict=True)]
        laid.sort(key=lambda heap: heap[0])
        heapq.heappush(entries, (laid[0][0] - laid[-1][0], next(order), laid))
    heaps = entries[0][2] if entries else [(0.0, [])] * ranks
    return [sorted(offsets) for _, offsets in heaps]


def utilisation(costs: Sequence[float], dealt: Sequence[Sequence[int]]) -> float:
    """Mean over maximum of the ranks' costs: the share of the time in which a rank works; 1 where there is none."""
    loads = [sum(costs[offset] for offset in offsets) for offsets in dealt]
    return sum(loads) / len(loads) / max(loads) if any(loads) else 1.0
