"""How long the job took to get over its faults, by kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence


class Times:
    """Seconds from the injection of a fault to the end of the first step after it, and what the job itself says."""

    def __init__(self) -> None:
        self.outside: dict[str, list[float]] = defaultdict(list)
        self.inside: dict[str, list[float]] = defaultdict(list)
        self.phases: dict[str, list[float]] = defaultdict(list)

    def add(self, kind: str, outside: float, inside: float | None, phases: dict[str, float]) -> None:
        """One fault; ``inside`` is what the job's record says, from its first evidence on, if it had to recover."""
        self.outside[kind].append(outside)
        if inside is not None:
            self.inside[kind].append(inside)
        for phase, seconds in phases.items():
            self.phases[phase].append(seconds)

    def table(self, crashes: frozenset[str]) -> str:
        """Count, median, 95th percentile and maximum by kind."""
        head = f"{'kind':<34}{'count':>6}   {'from outside: median':>20}{'p95':>7}{'max':>7}"
        head += f"   {'by its record: median':>21}{'p95':>7}{'max':>7}"
        lines = [head]
        rows = sorted(self.outside)
        crash = [kind for kind in rows if kind in crashes]
        for kind in rows:
            lines.append(_row(kind, self.outside[kind], self.inside[kind]))
        if crash:
            both = [[value for kind in crash for value in part[kind]] for part in (self.outside, self.inside)]
            lines.append(_row("all crashes", *both))
        phases = ", ".join(f"{name} {percentile(seconds, 0.5):.2f}" for name, seconds in self.phases.items())
        return "\n".join([*lines, f"median seconds by phase: {phases}"])


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed."""
    ordered = sorted(values)
    rank = -int(-share * len(ordered) // 1)  # rounded up
    return ordered[max(rank, 1) - 1]


def _row(kind: str, outside: Sequence[float], inside: Sequence[float]) -> str:
    return f"{kind:<34}{len(outside):>6}   {_three(outside, 20)}   {_three(inside, 21)}"


def _three(values: Sequence[float], width: int) -> str:
    if not values:
        return f"{'-':>{width}}{'-':>7}{'-':>7}"
    return f"{percentile(values, 0.5):>{width}.2f}{percentile(values, 0.95):>7.2f}{max(values):>7.2f}"
