"""From logs to figures: pure arithmetic over the steps that a job completed and the moment of the fault."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One completed optimizer step."""

    number: int
    """1 for the first; a step that is redone has the same number again."""
    time: float
    incarnation: str
    """Which life of the job did it: changes with every restart, or generation."""
    world: int = 0
    """How many workers did it together."""


@dataclass(frozen=True)
class Recovery:
    """What one fault cost."""

    recovery_seconds: float
    """From the kill to the end of the first step of a new incarnation."""
    caught_up_seconds: float | None
    """From the kill to the first step that had never been done; None if the job did not come so far."""
    steps_lost: int
    """Steps completed before the kill that were done again."""
    step_seconds: float
    """Median time between two steps before the kill."""


@dataclass(frozen=True)
class Productive:
    """What became of the wall time of a run under many faults."""

    wall_seconds: float
    """From the first completed step to the end of the measurement."""
    steps: int
    """Steps completed in it, also those that were done again later."""
    committed: int
    """Steps that count: not undone, which shows in a later step with the same or a lower number."""
    productive_seconds: float
    """How long the executions that count took together."""
    undisturbed_step_seconds: float
    """Median time between two steps before the first fault."""

    @property
    def goodput(self) -> float:
        """Productive share of the wall time."""
        return self.productive_seconds / self.wall_seconds

    @property
    def at_undisturbed_pace(self) -> float:
        """Share of the wall time in which an undisturbed job would have done as many steps."""
        return self.committed * self.undisturbed_step_seconds / self.wall_seconds


class NoRecovery(Exception):
    """The logs show no step after the fault; the message says what they do show."""


def measure(steps: Sequence[Step], killed_at: float) -> Recovery:
    """Figures of one run; times are seconds of one clock.

    Steps that survivors of the old incarnation still end after the kill count for nothing: they were in flight.

    Raises:
        NoRecovery: nothing was completed before the kill, or no new incarnation completed a step.
    """
    before = [step for step in steps if step.time <= killed_at]
    if not before:
        raise NoRecovery("no step was completed before the kill")
    old = {step.incarnation for step in before}
    after = sorted((s for s in steps if s.time > killed_at and s.incarnation not in old), key=lambda s: s.time)
    if not after:
        raise NoRecovery("no step was completed after the kill")
    highest = max(step.number for step in before)
    ever = max(step.number for step in steps if step.incarnation in old)
    caught_up = next((step.time - killed_at for step in after if step.number > ever), None)
    times = [step.time for step in before]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return Recovery(
        recovery_seconds=after[0].time - killed_at,
        caught_up_seconds=caught_up,
        steps_lost=max(0, highest - (after[0].number - 1)),
        step_seconds=statistics.median(gaps) if gaps else 0.0,
    )


def productive(steps: Sequence[Step], first_fault: float, end: float) -> Productive:
    """Figures of a run under many faults; times are seconds of one clock.

    A step took from the one before it to its own end. The first of an incarnation has none before it, only an outage:
    it counts as long as the median of its world size, but no longer than it can have been.

    Raises:
        NoRecovery: no two steps were completed before the first fault.
    """
    done = sorted((step for step in steps if step.time <= end), key=lambda step: step.time)
    gaps: dict[int, float] = {}
    latest: dict[str, Step] = {}
    for index, step in enumerate(done):
        if step.incarnation in latest:
            gaps[index] = step.time - latest[step.incarnation].time
        latest[step.incarnation] = step
    calm = [gap for index, gap in gaps.items() if done[index].time <= first_fault]
    if not calm:
        raise NoRecovery("no two steps were completed before the first fault")
    by_world: dict[int, list[float]] = {}
    for index, gap in gaps.items():
        by_world.setdefault(done[index].world, []).append(gap)
    usual = {world: statistics.median(found) for world, found in by_world.items()}
    took = {
        index: gaps.get(index, min(usual.get(step.world, statistics.median(calm)), step.time - done[index - 1].time))
        for index, step in enumerate(done)
        if index > 0  # the wall time begins with the end of the first
    }
    counts: list[int] = []
    lowest = math.inf
    for index in sorted(took, reverse=True):
        if done[index].number < lowest:
            lowest = done[index].number
            counts.append(index)
    return Productive(
        wall_seconds=end - done[0].time,
        steps=len(took),
        committed=len(counts),
        productive_seconds=sum(took[index] for index in counts),
        undisturbed_step_seconds=statistics.median(calm),
    )
