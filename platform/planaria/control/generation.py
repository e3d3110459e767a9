"""One generation as the controller sees it: who takes part, how far it came, how it began and ended."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from planaria.control.shares import Shares
from planaria.planner.plan import Plan
from planaria.runtime.outcome import Outcome


@dataclass
class Generation:
    """Bookkeeping of one generation; times are ``time.monotonic()``."""

    number: int
    plan: Plan
    cause: str
    """Why it began, for a person."""
    planned: bool
    """False if a failure ended its predecessor."""
    start_step: int
    change_at: float | None = None
    """When its predecessor was asked to end, or the first evidence of the fault that ended it."""
    began_at: float = field(default_factory=time.monotonic)
    first_step_at: float | None = None
    last_word_at: float = field(default_factory=time.monotonic)
    last_step_at: float | None = None
    step: int = 0
    """Steps completed."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds from the fault before it to its first step, by phase."""
    ending: dict[str, float] = field(default_factory=dict)
    """Seconds of its own end, by phase, if it broke."""
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    """Members that vanished, with the evidence."""
    pause_cause: str = ""
    """What its workers were asked to pause for: resize, drain or straggler."""
    nodes: tuple[str, ...] = ()
    """Node of every rank."""
    token: str = ""
    """Names its checkpoint attempts."""
    covered: bool = False
    """Whether memory holds a complete state that was reached in it."""
    recorded: int = -1
    """Last step whose metrics are on record."""
    ledgered: int = -1
    """Last step whose samples are on record."""
    problems: dict[int, str] = field(default_factory=dict)
    """Why the checkpoint of a step failed, by step."""
    silent_since: float | None = None
    """When the member that was lost, or hung, was last heard of, if that was long before the fault was found."""
    hung: str = ""
    """That nobody got ahead any more, if that ended it."""
    shares: Shares = field(default_factory=Shares)
    """What steps that may or may not count have consumed."""
    unheard: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Reports of other ranks on steps of which the first rank has not reported, by step."""

    reports: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The newest that each rank has reported of its steps."""

    @property
    def members(self) -> tuple[str, ...]:
        """Workers that take part."""
        return self.plan.ranks

    @property
    def pending(self) -> list[str]:
        """Members that have neither returned nor vanished."""
        return [ident for ident in self.members if ident not in self.outcomes and ident not in self.lost]

    @property
    def recovery_s(self) -> float | None:
        """Seconds from the change (the first evidence of a fault) to the end of the first step here."""
        if self.change_at is None or self.first_step_at is None:
            return None
        return self.first_step_at - self.change_at

    @property
    def highest(self) -> int | None:
        """Highest step that was completed here; None if none was."""
        return self.step - 1 if self.step > self.start_step else None

    def note_step(self, message: dict[str, Any]) -> None:
        """A rank finished a step."""
        now = time.monotonic()
        self.last_word_at = now
        if self.first_step_at is None and message["rank"] == 0:
            self.first_step_at = now
        if message["rank"] == 0:
            self.step = max(self.step, message["step"] + 1)
