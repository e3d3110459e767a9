"""Which source the next sample comes from: exact shares at every moment. Pure.

Weights are cut into W equal parts, of which source i holds a_i. The draw repeats itself every W samples, and in each
period source i is drawn a_i times, so the long-run shares are exact. Within a period, draw j of source i falls into
the slots [floor(j W / a_i), ceil((j + 1) W / a_i)), and of all draws that may come now the one with the earliest
deadline does: the windows of Pfair scheduling (Baruah, Cohen, Plaxton and Varvel, 1996), which earliest deadline first
meets on one machine. So after any number p of samples, source i has been drawn fewer than one time more or less
than p a_i / W. Where a period is known, any position costs O(1).
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm

import numpy as np
from numpy.typing import NDArray

MOST_PARTS = 100_000
"""Longest period."""


def parts_of(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest whole numbers that stand to each other as ``weights`` do, read as decimals.

    Raises:
        ValueError: no weight, one that is not positive, or a sum of more than ``MOST_PARTS`` parts.
    """
    if not weights or any(not 0 < weight < float("inf") for weight in weights):
        raise ValueError("a mixture needs weights, and each of them positive")
    fractions = [Fraction(str(weight)) for weight in weights]
    common = lcm(*(fraction.denominator for fraction in fractions))
    whole = [int(fraction * common) for fraction in fractions]
    parts = tuple(part // gcd(*whole) for part in whole)
    if sum(parts) > MOST_PARTS:
        raise ValueError(
            f"the weights {', '.join(f'{weight:g}' for weight in weights)} need {sum(parts):,} parts to be exact, and "
            f"{MOST_PARTS:,} are the most; give them fewer digits"
        )
    return parts


class Draw:
    """The draw for one set of weights, by position."""

    def __init__(self, parts: tuple[int, ...]) -> None:
        """
        Args:
            parts: of each source; see :func:`parts_of`.
        """
        self.parts = parts
        self.period = sum(parts)
        self._source, self._nth = _one_period(parts)

    def at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(source, number of earlier draws of that source) for each position >= 0."""
        rounds, slots = np.divmod(positions, self.period)
        sources = self._source[slots]
        return sources, rounds * np.asarray(self.parts, np.int64)[sources] + self._nth[slots]

    def counts(self, position: int) -> list[int]:
        """How often each source is drawn before ``position``."""
        rounds, slots = divmod(position, self.period)
        begun = np.bincount(self._source[:slots], minlength=len(self.parts))
        return [rounds * part + int(more) for part, more in zip(self.parts, begun, strict=True)]


@functools.lru_cache(maxsize=8)
def _one_period(parts: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    total = sum(parts)
    source, nth = np.empty(total, np.int64), np.empty(total, np.int64)
    waiting = [(0, index) for index in range(len(parts))]  # (slot from which it may come, source)
    free: list[tuple[int, int]] = []  # (deadline, source)
    drawn = [0] * len(parts)
    for slot in range(total):
        while waiting and waiting[0][0] <= slot:
            _, index = heapq.heappop(waiting)
            heapq.heappush(free, (-(-(drawn[index] + 1) * total // parts[index]), index))
        _, index = heapq.heappop(free)
        source[slot], nth[slot] = index, drawn[index]
        drawn[index] += 1
        if drawn[index] < parts[index]:
            heapq.heappush(waiting, (drawn[index] * total // parts[index], index))
    return source, nth
