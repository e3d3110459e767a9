"""From logs to figures: pure arithmetic over the steps that a job completed and the moment of the fault."""

from __future__ import annotations

import itertools
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
