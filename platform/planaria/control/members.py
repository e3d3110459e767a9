"""Who belongs to the job: pure bookkeeping of worker and loader processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from planaria.memory.wire import KeeperAddress
from planaria.planner.plan import WorkerSlot


class Life(StrEnum):
    """Stations of a process's life."""

    STARTING = "starting"
    READY = "ready"
    LOST = "lost"


@dataclass
class Member:
    """One worker or loader process."""

    ident: str
    node: str
    handle: Any
    life: Life = Life.STARTING
    since: float = field(default_factory=time.monotonic)
    pid: int = 0
    address: KeeperAddress | None = None
    """Where a keeper listens."""


class Members:
    """All processes of one kind that were ever started."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._all: dict[str, Member] = {}

    def next_ident(self) -> str:
        """A name that no process had before: names are never reused, so no late word can be misattributed."""
        return f"{self._kind}-{len(self._all)}"

    def add(self, member: Member) -> None:
        """Enter a process that was just started."""
        self._all[member.ident] = member

    def get(self, ident: str) -> Member | None:
        """The process of that name."""
        return self._all.get(ident)

    def of(self, *lives: Life) -> Iterator[Member]:
        """Processes at one of these stations, oldest first."""
        return (member for member in self._all.values() if member.life in lives)

    def lose(self, ident: str) -> bool:
        """Mark a process as lost; False if it was lost already or is unknown."""
        member = self._all.get(ident)
        if member is None or member.life is Life.LOST:
            return False
        member.life, member.since = Life.LOST, time.monotonic()
        return True

    def ready(self, ident: str, pid: int, node: str = "") -> None:
        """Mark a starting process as ready; ``node`` says where it came up, if not where it was asked for."""
        member = self._all[ident]
        if member.life is Life.STARTING:
            member.life, member.since, member.pid = Life.READY, time.monotonic(), pid
            member.node = node or member.node

    def slots(self) -> list[WorkerSlot]:
        """The ready processes, for the planner."""
        return [WorkerSlot(member.ident, member.node) for member in self.of(Life.READY)]

    def per_node(self) -> dict[str, int]:
        """How many living processes each node carries."""
        counts: dict[str, int] = {}
        for member in self.of(Life.STARTING, Life.READY):
            counts[member.node] = counts.get(member.node, 0) + 1
        return counts


def placements(capacity: dict[str, int], carried: dict[str, int], wanted: int) -> list[str]:
    """Nodes for up to ``wanted`` new workers: always the node with the most free places, so that they spread."""
    free = {node: count - carried.get(node, 0) for node, count in capacity.items()}
    chosen: list[str] = []
    while len(chosen) < wanted:
        node = max(free, key=lambda name: (free[name], name), default=None)
        if node is None or free[node] < 1:
            break
        free[node] -= 1
        chosen.append(node)
    return chosen
