"""Stragglers: ranks that compute more slowly than their peers, window after window.

Compare compute time without waiting: in a synchronous step everybody's step takes as long as the slowest one's.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

WINDOWS = 3
"""Windows in a row that make a straggler, and that clear one."""
SPREAD = 5.0
"""A straggler is further from the median than so many standard deviations (by the median absolute deviation)."""
NARROWEST = 0.02
"""Standard deviation to assume at the least, as a share of the median: equal times must not make noise a signal."""
MAD_TO_SIGMA = 1.4826
"""Ratio of standard deviation to median absolute deviation of a normal distribution."""

Seat = tuple[str, str]
"""Process and node: another process or another place starts with a clean record."""


@dataclass(frozen=True)
class Straggler:
    """A rank that holds the others up."""

    rank: int
    node: str
    ratio: float
    """Its compute time over the median of the other ranks."""
    member: str = ""
    """The process that has the rank, if the caller named it."""

    @property
    def seat(self) -> Seat:
        """What its record is kept under."""
        return self.member or f"rank {self.rank}", self.node


@dataclass(frozen=True)
class Standing:
    """What earlier windows said; start with an empty one."""

    slow: Mapping[Seat, int] = field(default_factory=dict)
    """Windows in a row in which a rank was slow, for ranks that are not flagged."""
    calm: Mapping[Seat, int] = field(default_factory=dict)
    """Windows in a row in which a flagged rank was no longer slow."""
    stragglers: tuple[Straggler, ...] = ()
    """Flagged ranks, worst first, with the ratio of the newest window."""


def judge(
    seconds: Mapping[int, Sequence[float]],
    nodes: Mapping[int, str],
    before: Standing,
    ratio: float,
    members: Mapping[int, str] | None = None,
    stages: Mapping[int, int] | None = None,
) -> Standing:
    """Take one more window in.

    A rank becomes a straggler after :data:`WINDOWS` windows in a row in which its median is at least ``ratio`` times
    that of the others and far outside of their spread. It ceases to be one after as many windows below the middle of
    1 and ``ratio``: between the two it stays what it was, so that nothing flickers.

    Args:
        seconds: compute time of each step of the window, by rank; ranks without any are not judged.
        nodes: node of every rank.
        before: what came out of the windows before.
        ratio: ``elastic.straggler_ratio``, above 1.
        members: name of the process of every rank. Given, records follow processes to other ranks, which a change
            of membership may give them; else they stay with ranks.
        stages: pipeline stage of every rank. Only ranks of one stage have equal work, and are compared.

    Raises:
        ValueError: ``ratio`` is not above 1.
    """
    if ratio <= 1:
        raise ValueError(f"ratio={ratio} must be above 1")
    medians = {rank: statistics.median(times) for rank, times in seconds.items() if times}
    by_stage: dict[int, dict[int, float]] = {}
    for rank, median in medians.items():
        by_stage.setdefault(stages[rank] if stages is not None else 0, {})[rank] = median
    ratios: dict[int, float] = {}
    far: dict[int, bool] = {}
    for peers in by_stage.values():
        slower, beyond = _compare(peers)
        ratios |= slower
        far |= beyond
    flagged = {item.seat for item in before.stragglers}
    slow: dict[Seat, int] = {}
    calm: dict[Seat, int] = {}
    found: list[Straggler] = []
    for rank, times_slower in ratios.items():
        straggler = Straggler(rank, nodes[rank], times_slower, members[rank] if members is not None else "")
        seat = straggler.seat
        if seat in flagged:
            quiet = before.calm.get(seat, 0) + 1 if times_slower < (1 + ratio) / 2 else 0
            if quiet < WINDOWS:
                calm[seat] = quiet
                found.append(straggler)
        elif times_slower >= ratio and far[rank]:
            streak = before.slow.get(seat, 0) + 1
            if streak < WINDOWS:
                slow[seat] = streak
            else:
                found.append(straggler)
    return Standing(slow, calm, tuple(sorted(found, key=lambda item: (-item.ratio, item.rank))))


def _compare(medians: Mapping[int, float]) -> tuple[dict[int, float], dict[int, bool]]:
    """Each rank's time over the median of the others, and whether it is far outside of all ranks' spread."""
    if len(medians) < 2:
        return {}, {}
    order = sorted(medians.values())
    middle = statistics.median(order)
    sigma = MAD_TO_SIGMA * statistics.median(abs(value - middle) for value in order)
    # Of two ranks the spread is all the slower one's doing, and tells nothing.
    reach = SPREAD * max(sigma if len(medians) > 2 else 0.0, NARROWEST * middle)
    ratios = {}
    for rank, value in medians.items():
        others = _median_without(order, value)
        ratios[rank] = value / others if others > 0 else 1.0
    return ratios, {rank: value - _median_without(order, value) > reach for rank, value in medians.items()}


def _median_without(order: Sequence[float], value: float) -> float:
    """Median of sorted ``order`` without one occurrence of ``value``, in constant time."""
    half, odd = divmod(len(order), 2)
    if odd:  # an even number stays: the two around the middle, or the middle and its neighbour
        middle = order[half]
        if value < middle:
            return (middle + order[half + 1]) / 2
        if value > middle:
            return (order[half - 1] + middle) / 2
        return (order[half - 1] + order[half + 1]) / 2
    return order[half] if value <= order[half - 1] else order[half - 1]


@dataclass(frozen=True)
class Replace:
    """At the next step boundary ``by`` takes over the straggler's rank."""

    straggler: Straggler
    by: str
    node: str
    """Of ``by``."""


def replacement(standing: Standing, spares: Mapping[str, Sequence[str]], enabled: bool) -> Replace | None:
    """Which straggler to replace, and by whom; one at a time, the worst first.

    Args:
        standing: what the windows said.
        spares: ready workers without a rank, by node; no node under notice or in quarantine.
        enabled: ``elastic.replace_stragglers``.
    """
    slow_nodes = {item.node for item in standing.stragglers}
    usable = {node: members for node, members in spares.items() if members and node not in slow_nodes}
    if not enabled or not standing.stragglers or not usable:
        return None
    node = min(usable, key=lambda name: (-len(usable[name]), name))
    return Replace(standing.stragglers[0], usable[node][0], node)
