"""Who belongs to the job: pure bookkeeping of its processes."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from planaria.memory.wire import KeeperAddress
from planaria.planner.plan import WorkerSlot
from planaria.runtime.hello import Hello

REMEMBERED = 256
"""Lost processes that are remembered: late words of theirs come within seconds."""


class Life(StrEnum):
    """Stations of a process's life."""

    STARTING = "starting"
    READY = "ready"
    LOST = "lost"


@dataclass
class Member:
    """One process."""

    ident: str
    node: str
    handle: Any
    life: Life = Life.STARTING
    since: float = field(default_factory=time.monotonic)
    pid: int = 0
    address: KeeperAddress | None = None
    """Where a keeper listens."""
    generation: int = 0
    """The newest generation that a worker knew of when it said hello."""
    gpus: str = ""
    """The devices that Ray gave it."""


class Members:
    """Processes of one kind: those that are there, and the last ones that were lost."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._all: dict[str, Member] = {}
        self._names = 0
        self._lost: deque[str] = deque()

    def next_ident(self) -> str:
        """A name that no process had before: names are never reused, so no late word can be misattributed."""
        name = f"{self.kind}-{self._names}"
        self._names += 1
        return name

    def add(self, member: Member) -> None:
        """Enter a process that was just started, or has come from another kind."""
        self._all[member.ident] = member
        kind, _, number = member.ident.rpartition("-")
        if kind == self.kind:
            self._names = max(self._names, int(number) + 1)

    def remove(self, ident: str) -> Member:
        """Give a process away to another kind."""
        return self._all.pop(ident)

    def get(self, ident: str) -> Member | None:
        """The process of that name."""
        return self._all.get(ident)

    def of(self, *lives: Life) -> Iterator[Member]:
        """Processes at one of these stations, oldest first."""
        # A list, since the controller is asked for its status by another thread.
        return (member for member in list(self._all.values()) if member.life in lives)

    def lose(self, ident: str) -> bool:
        """Mark a process as lost; False if it was lost already or is unknown."""
        member = self._all.get(ident)
        if member is None or member.life is Life.LOST:
            return False
        member.life, member.since = Life.LOST, time.monotonic()
        self._lost.append(ident)
        if len(self._lost) > REMEMBERED:
            self._all.pop(self._lost.popleft(), None)
        return True

    def ready(self, ident: str, hello: Hello) -> None:
        """Mark a starting process as ready, with what it said of itself."""
        member = self._all[ident]
        if member.life is Life.STARTING:
            member.life, member.since, member.pid = Life.READY, time.monotonic(), hello.pid
            member.node, member.address = hello.node, hello.address
            member.generation, member.gpus = hello.generation, member.gpus or hello.gpus

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
    # Where two have equally many, the one that is last by name; a heap, since a fleet starts on thousands of nodes.
    names = sorted(capacity, reverse=True)
    heap = [(carried.get(node, 0) - capacity[node], at) for at, node in enumerate(names)]
    heapq.heapify(heap)
    chosen: list[str] = []
    while heap and len(chosen) < wanted and heap[0][0] < 0:
        taken, at = heap[0]
        heapq.heapreplace(heap, (taken + 1, at))
        chosen.append(names[at])
    return chosen
