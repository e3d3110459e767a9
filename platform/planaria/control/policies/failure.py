"""Whether a job goes on after a failure: those with progress are free, those without have a budget."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from planaria.control.policies.decisions import GiveUp


@dataclass(frozen=True)
class UserError:
    """An exception out of the user's own code: model, loss, data set or collate."""

    type: str
    message: str

    @property
    def signature(self) -> tuple[str, str]:
        """Equal for two occurrences of one bug: object addresses, ranks and process ids are left out."""
        message = re.sub(r"0x[0-9a-fA-F]+", "0x", self.message)
        return self.type, re.sub(r"\b(rank|worker|pid|process)([ =:_-]*)\d+", r"\1\2", message, flags=re.IGNORECASE)

    def __str__(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


@dataclass(frozen=True)
class Failure:
    """Why a generation ended."""

    cause: str
    """For people, e.g. ``node n2 lost``."""
    step: int
    """The step that was under way."""
    user_error: UserError | None = None


@dataclass(frozen=True)
class Generation:
    """One generation as the policies see it."""

    number: int
    last_step: int | None = None
    """Highest step that it completed; None if it completed none."""
    failure: Failure | None = None
    """None while it runs, and after a planned change (resize, drain)."""


@dataclass(frozen=True)
class Continue:
    """Form the next generation."""

    failures: int
    """Failures since the last new highest step, this one included."""


@dataclass(frozen=True)
class FailurePolicy:
    """Stops a job that cannot get ahead.

    ``max_failures`` failures are forgiven until a step completes that none before had completed; then counting
    starts anew, at 1 for the failure that ended the generation which got ahead. So 0 stops at the first failure
    and a negative number forgives all, as in ``ray.train.FailureConfig``. Generations that end as planned count
    neither way, unless they got ahead.

    An exception of the user's own code that returns at the same step, of the same type and with the same
    message, is a bug and no accident: the second occurrence stops the job at once, whatever ``max_failures``.
    """

    max_failures: int

    def decide(self, history: Sequence[Generation]) -> Continue | GiveUp:
        """What to do after the last generation of ``history``, which holds all of them, oldest first."""
        bug = _repeated_user_error(history)
        if bug:
            return bug
        best, streak = _failures_without_progress(history)
        if 0 <= self.max_failures < len(streak):
            return GiveUp(self._diagnosis(best, streak))
        return Continue(len(streak))

    def _diagnosis(self, best: int | None, streak: Sequence[Generation]) -> str:
        last = streak[-1].failure
        assert last is not None  # a streak holds failed generations only
        if self.max_failures == 0:
            return f"{last.cause} at step {last.step}, and elastic.max_failures=0 forgives no failure"
        got = "no step was ever completed" if best is None else f"no step after {best} was completed"
        causes = ", ".join(dict.fromkeys(item.failure.cause for item in streak if item.failure))
        return (
            f"{len(streak)} failures in a row without progress ({got}; elastic.max_failures={self.max_failures}). "
            f"Causes: {causes}. Fix the cause, or raise elastic.max_failures; the job resumes from its last checkpoint"
        )


def _failures_without_progress(history: Sequence[Generation]) -> tuple[int | None, list[Generation]]:
    """The highest completed step, and the failed generations since it was reached."""
    best: int | None = None
    streak: list[Generation] = []
    for generation in history:
        if generation.last_step is not None and (best is None or generation.last_step > best):
            best = generation.last_step
            streak = []
        if generation.failure:
            streak.append(generation)
    return best, streak


def _repeated_user_error(history: Sequence[Generation]) -> GiveUp | None:
    """Whether the newest failure is a user error that was seen before at the same step."""
    newest = history[-1].failure if history else None
    if newest is None or newest.user_error is None:
        return None
    for generation in history[:-1]:
        earlier = generation.failure
        if (
            earlier
            and earlier.user_error
            and earlier.step == newest.step
            and earlier.user_error.signature == newest.user_error.signature
        ):
            return GiveUp(
                f"the job's own code fails at step {newest.step} every time, in generations {generation.number} and "
                f"{history[-1].number} alike: {newest.user_error}. Trying again cannot help; fix the code or the data"
            )
    return None
