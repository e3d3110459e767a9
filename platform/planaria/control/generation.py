"""One generation as the controller sees it: who takes part, how far it came, how it began and ended."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

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
    """State of the job that its workers were asked to pause for."""
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
    _ids: dict[int, dict[int, list[int]]] = field(default_factory=dict)
    _sums: dict[int, dict[str, int]] = field(default_factory=dict)

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

    def gather(self, message: dict[str, Any]) -> tuple[list[int], int] | None:
        """Collect ids and tokens of a step over the data-parallel ranks; (ids, tokens) once all have reported."""
        layout = self.plan.layout
        rank, step = message["rank"], message["step"]
        if layout.coords(rank)["tp"] != 0:
            return None
        ids = self._ids.setdefault(step, {})
        sums = self._sums.setdefault(step, {"tokens": 0})
        ids[layout.dp_rank(rank)] = message["ids"]
        sums["tokens"] += message["tokens"]
        if len(ids) < layout.dp:
            return None
        del self._ids[step]
        merged = [index for dp_rank in sorted(ids) for index in ids[dp_rank]]
        return merged, self._sums.pop(step)["tokens"]
