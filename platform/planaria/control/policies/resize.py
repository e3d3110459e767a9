"""Whether a healthy generation should grow, and when that is worth an interruption."""

from __future__ import annotations

from dataclasses import dataclass

from planaria.config import ElasticConfig
from planaria.control.policies.decisions import Keep

LONGEST_SETTLE_S = 600.0
"""Nodes that come and go delay growth no longer than this."""
PATIENCE = 6.0
"""A set of workers that is never quiet delays growth by so many settle times at most: one restless node must not
keep the steady ones idle for ever."""


@dataclass(frozen=True)
class Grow:
    """Re-plan over ``workers`` workers, more than now, at the next step boundary."""

    workers: int


@dataclass(frozen=True)
class Calm:
    """How calm the set of ready workers is."""

    quiet_s: float
    """Seconds since a worker last became ready or was lost."""
    waiting_s: float
    """Seconds since more workers have been ready than run."""
    settle_s: float
    """Quiet time that growing needs: :func:`settle_time`."""

    @property
    def settled(self) -> bool:
        """Whether to grow now."""
        return self.quiet_s >= self.settle_s or self.waiting_s >= PATIENCE * self.settle_s


def resize(running: int, ready: int, config: ElasticConfig, calm: Calm | None = None) -> Keep | Grow:
    """Whether a healthy generation should grow; it shrinks by losses and departures only, which others decide.

    It grows once the set of ready workers is calm or the maximum is reached, so that nodes that join one after the
    other cost one interruption and not one each.

    Args:
        running: workers that hold a rank.
        ready: workers that a plan would give a rank, those that run included. Count them by planning: a spare
            more that no layout can use is no reason to interrupt.
        config: limits.
        calm: how calm the set of ready workers is; None: growth waits for nothing.
    """
    target = min(ready, config.max_workers)
    if target <= running:
        return Keep()
    settled = calm is None or calm.settled or target == config.max_workers
    return Grow(target) if settled else Keep()


def settle_time(settle_s: float, change_s: float, undone: int) -> float:
    """Quiet time to ask for before growing, in seconds.

    A worker that stays for less than a change of size takes costs more than it brings. So growing waits at least as
    long as the last change took, and twice as long again for every growth that was undone soon after it was made.

    Args:
        settle_s: ``elastic.settle_s``.
        change_s: seconds that the last recovery or change of size took; 0 if there was none.
        undone: how many of the last growths, without one that lasted since, were undone by the loss of a worker;
            see :func:`growths_undone`.
    """
    # Bounded before the power is taken: a float overflows at 1024 doublings.
    return min(max(settle_s, change_s) * 2.0 ** min(undone, 32), max(LONGEST_SETTLE_S, settle_s))


def growths_undone(stays: list[float], change_s: float) -> int:
    """How many of the last growths in a row brought less than they cost.

    Args:
        stays: seconds from each growth to the next loss of a worker, oldest first; the last may still last
            (seconds until now), and counts only once it is over: leave it out until then, or it has paid.
        change_s: seconds that a change of size takes. It is made and unmade, so a stay has paid after ten times that.
    """
    count = 0
    for stay in reversed(stays):
        if stay >= 10 * change_s:
            break
        count += 1
    return count
