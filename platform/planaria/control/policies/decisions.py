"""Decisions that more than one policy can come to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Keep:
    """Change nothing."""


@dataclass(frozen=True)
class GiveUp:
    """Stop the job; ``reason`` is the diagnosis that the user reads."""

    reason: str


@dataclass(frozen=True)
class Pause:
    """Too few workers will be left: checkpoint to the durable store, then wait for more."""

    workers: int
    """How many will be left."""
    nodes: tuple[str, ...] = ()
    """Nodes that are left, if a notice is the cause."""
    members: tuple[str, ...] = ()
    """Workers on those nodes that hold a rank."""
