"""What a kind of fault is: a precondition, an injector, and how to see that it is over."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from tests.chaos.world import World

if TYPE_CHECKING:
    from tests.chaos.stage import Stage


@dataclass(frozen=True)
class Fault(ABC):
    """One fault of a script. Its fields are all that chance decides, so that its ``repr`` is enough to replay it.

    Writing a script (:meth:`possible`, :meth:`draw`) knows only the world; injecting knows the running job.
    """

    kind: ClassVar[str]
    weight: ClassVar[float] = 1.0
    """How often it is drawn, beside the others."""
    unsupported: ClassVar[str] = ""
    """Why this kind is left out of scripts, if it is."""
    limit_s: ClassVar[float] = 120.0
    """Longest time until it is over."""

    @classmethod
    def possible(cls, world: World) -> bool:
        """Whether it can happen to ``world``."""
        return bool(world.nodes)

    @classmethod
    @abstractmethod
    def draw(cls, dice: random.Random, world: World) -> Self:
        """A fault of this kind; ``world`` becomes what it leaves."""

    @abstractmethod
    def strike(self, stage: Stage) -> Blow:
        """Inject it."""

    def over(self, stage: Stage, blow: Blow) -> bool:
        """Whether the job has got over it; looked at again and again. By default: everybody that it hit is known to be
        lost, and a step was completed since, in a later generation if a member of the running one was hit."""
        return blow.passed(stage)

    def finish(self, stage: Stage, blow: Blow) -> None:  # noqa: B027 - most leave nothing
        """Check and put in order what it left, once it is over."""


@dataclass
class Blow:
    """A fault that has been injected."""

    at: float
    """Unix time of the first injection."""
    generation: int
    """The generation that ran then."""
    victims: tuple[int, ...] = ()
    """Processes of the job that must be found lost."""
    breaks: bool = True
    """Whether the running generation cannot go on."""
    last_at: float = 0.0
    """Unix time of the last injection, if there were several."""
    resumed_at: float | None = None
    """When the first step after it was completed."""
    note: str = ""

    def passed(self, stage: Stage) -> bool:
        """See :meth:`Fault.over`."""
        if any(pid not in stage.lost_at for pid in self.victims):
            return False
        row = next(
            (row for row in stage.steps if row["time"] > max(self.at, self.last_at) and self._counts(stage, row)), None
        )
        if row is None:
            return False
        self.resumed_at = row["time"]
        return True

    def _counts(self, stage: Stage, row: dict[str, Any]) -> bool:
        """Whether a step shows that the job goes on: not one that the broken generation still reported."""
        if not self.breaks:
            return True
        hit = {stage.member_of[pid] for pid in self.victims if pid in stage.member_of}
        return row["gen"] > self.generation and not hit & set(stage.workers_of(row["gen"]))
