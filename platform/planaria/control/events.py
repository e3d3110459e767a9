"""What the controller hears. Every source puts one of these into one queue; one loop takes them out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from planaria.memory.wire import KeeperAddress
from planaria.runtime.outcome import Outcome


@dataclass(frozen=True)
class Said:
    """A process sent a message over its beacon."""

    ident: str
    message: dict[str, Any]


@dataclass(frozen=True)
class Gone:
    """A process is no more: its beacon closed, its node left, or Ray says that its actor died."""

    ident: str
    why: str


@dataclass(frozen=True)
class Started:
    """A worker, loader or keeper answered for the first time, or failed to."""

    ident: str
    pid: int = 0
    node: str = ""
    """Where it really runs: Ray may have put a loader elsewhere than asked."""
    address: KeeperAddress | None = None
    """Where it listens, if it is a keeper."""
    error: BaseException | None = None


@dataclass(frozen=True)
class Ended:
    """A worker returned from a generation."""

    ident: str
    generation: int
    outcome: Outcome


@dataclass(frozen=True)
class NodesSeen:
    """A look at the cluster: node id -> how many workers the node can carry."""

    capacity: dict[str, int]


@dataclass(frozen=True)
class StopAsked:
    """Somebody wants the job to end at the next step boundary, with a checkpoint."""

    why: str


@dataclass(frozen=True)
class Saved:
    """An attempt to save the state of ``step`` of a generation is over."""

    generation: int
    step: int
    seconds: float
    """From the snapshot to the commit."""
    problem: str | None = None
    """Why it failed."""
    fenced: bool = False
    """Whether it failed since another controller has taken the run over."""


Event = Said | Gone | Started | Ended | NodesSeen | StopAsked | Saved
