"""Bounded retries with exponential backoff and jitter. The policy is pure; clock, sleep and chance are given."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class RetryPolicy:
    """How often, and how far apart, something is tried again.

    The pause before try ``n + 1`` is ``first_s * factor ** (n - 1)``, at most ``longest_s``, of which a random
    share of up to ``jitter`` is taken off: many workers that fail together must not come back together.

    Attributes:
        attempts: tries in all, at least 1.
        first_s: pause after the first failure, in seconds.
        factor: growth of the pause per failure.
        longest_s: the longest pause, in seconds.
        jitter: from 0 (none) to 1 (anything from nothing to the whole pause).
        give_up_s: no try begins later than this many seconds after the first.
    """

    attempts: int = 8
    first_s: float = 0.2
    factor: float = 2.0
    longest_s: float = 10.0
    jitter: float = 0.5
    give_up_s: float = 180.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts={self.attempts} must be at least 1")
        if min(self.first_s, self.longest_s, self.give_up_s) < 0 or self.factor < 1 or not 0 <= self.jitter <= 1:
            raise ValueError(f"{self}: times must not be negative, factor at least 1, jitter from 0 to 1")

    def pause(self, failures: int, spent_s: float, chance: float) -> float | None:
        """Seconds to wait after so many failures; ``None``: give up.

        Args:
            failures: failed tries so far, at least 1.
            spent_s: seconds since the first try began.
            chance: a random number from 0 to 1.
        """
        if failures >= self.attempts:
            return None
        # The exponent is bounded, as a float overflows long before a patient policy ends.
        pause = min(self.longest_s, self.first_s * self.factor ** min(failures - 1, 60))
        pause *= 1 - self.jitter * chance
        return pause if spent_s + pause <= self.give_up_s else None

    def brief(self) -> RetryPolicy:
        """For clean-up after a failure: one more try, soon."""
        return replace(self, attempts=min(self.attempts, 2))


class GaveUp(Exception):
    """The last of several tries failed; ``__cause__`` is its error.

    Attributes:
        attempts: tries made.
        spent_s: seconds since the first began.
    """

    def __init__(self, attempts: int, spent_s: float) -> None:
        self.attempts, self.spent_s = attempts, spent_s
        super().__init__(f"{attempts} tries in {spent_s:.1f} s")


async def retried(
    policy: RetryPolicy,
    attempt: Callable[[], Awaitable[T]],
    transient: Callable[[Exception], bool],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    chance: Callable[[], float] = random.random,
) -> T:
    """The result of ``attempt``, made again after each transient error as ``policy`` allows.

    Raises:
        GaveUp: the policy ended; caused by the last error.
        Exception: the first error that is not transient, as it is.
    """
    began, failures = clock(), 0
    while True:
        try:
            return await attempt()
        except Exception as error:
            if not transient(error):
                raise
            failures += 1
            pause = policy.pause(failures, clock() - began, chance())
            if pause is None:
                raise GaveUp(failures, clock() - began) from error
        await sleep(pause)
