"""What the controller hears. Every source puts one of these into one queue; one loop takes them out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from planaria.runtime.hello import Hello


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
    """A worker, loader or keeper answered for the first time (in this life of the controller), or failed to."""

    ident: str
    hello: Hello | None = None
    error: BaseException | None = None


@dataclass(frozen=True)
class NodesSeen:
    """A look at the cluster."""

    capacity: dict[str, int]
    """Workers that each node can carry, by node id."""
    leaving: dict[str, float | None] = field(default_factory=dict)
    """Nodes under notice, with the moment (``time.monotonic()``) at which they go; None if nobody said when."""
    hosts: dict[str, str] = field(default_factory=dict)
    """Address of each living node, also of those without a place."""


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
    nbytes: int = 0
    """Size of the tensors that were committed."""


Event = Said | Gone | Started | NodesSeen | StopAsked | Saved
