"""How a generation ended for one worker: plain values that travel from worker to controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class End(StrEnum):
    """Why a rank left its generation."""

    FINISHED = "finished"
    PAUSED = "paused"
    STOPPED = "stopped"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Outcome:
    """The end of a generation in one worker."""

    end: End
    step: int = 0
    """Steps completed in the state that the worker held at the end."""
    error: str | None = None
    kind: str | None = None
    """Type name of the error."""
    trace: str | None = None
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds: form, build, restore."""


def outcome_of(plain: Mapping[str, Any]) -> Outcome:
    """The outcome of which ``plain`` is ``dataclasses.asdict``."""
    return Outcome(**{**plain, "end": End(plain["end"])})
