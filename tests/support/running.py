"""A running job, followed through the records that it writes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.lines import Lines

GLANCE_S = 0.02
"""Seconds between two looks at the records."""


class Trouble(AssertionError):
    """The job did not do what it must; the text holds the last events."""


class RunningJob:
    """Follows ``events.jsonl`` and ``metrics.jsonl`` in ``run_dir``.

    Args:
        ended: tells that the job's command has ended.
    """

    def __init__(self, run_dir: Path, ended: Callable[[], bool]) -> None:
        self.run_dir, self._ended = run_dir, ended
        self._events, self._metrics = Lines(run_dir / "events.jsonl"), Lines(run_dir / "metrics.jsonl")
        self.events: deque[dict[str, Any]] = deque(maxlen=400)
        self.steps: deque[dict[str, Any]] = deque(maxlen=2000)
        self.generations: list[dict[str, Any]] = []
        self.recovered: list[dict[str, Any]] = []
        self.state = ""
        self.pid_of: dict[str, int] = {}
        self.member_of: dict[int, str] = {}
        self.node_of: dict[str, str] = {}
        """Ray's id of a member's node."""
        self.lost_at: dict[int, float] = {}
        """When a process was given up or sent away, by its id."""

    def look(self) -> None:
        """Read what was written since the last look."""
        for event in self._events.new():
            self._take(event)
        self.steps.extend(self._metrics.new())

    def _take(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        match event["event"]:
            case "state":
                self.state = event["to"]
            case "joined":
                self.pid_of[event["member"]] = event["pid"]
                self.member_of[event["pid"]] = event["member"]
                self.node_of[event["member"]] = event["node"]
            case "lost" | "dismissed":
                self.lost_at[event["pid"]] = event["time"]
            case "generation":
                self.generations.append(event)
            case "recovered":
                self.recovered.append(event)

    def until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Look until ``condition`` holds.

        Raises:
            Trouble: it does not hold within ``seconds``, or the job ended.
        """
        deadline = time.monotonic() + seconds
        while True:
            over = self._ended()  # before the look: its last words are not missed
            self.look()
            if condition():
                return
            if over:
                raise Trouble(f"the job ended while waiting for {what}\n{self.excerpt()}")
            if time.monotonic() > deadline:
                raise Trouble(f"{what}: not within {seconds:g} s\n{self.excerpt()}")
            time.sleep(GLANCE_S)

    def excerpt(self, count: int = 40) -> str:
        """The last events, for a person."""
        return "\n".join(_text(event) for event in list(self.events)[-count:])

    @property
    def step(self) -> int:
        """Steps that were completed and not undone."""
        return self.steps[-1]["step"] + 1 if self.steps else 0

    @property
    def generation(self) -> int:
        """Number of the newest generation; 0: none yet."""
        return self.generations[-1]["gen"] if self.generations else 0

    def workers_of(self, generation: int) -> Sequence[str]:
        """Members of a generation, by rank."""
        workers: Sequence[str] = self.generations[generation - 1]["workers"]
        return workers

    def calm(self) -> bool:
        """Whether the newest generation trains."""
        return self.state == "running" and bool(self.steps) and self.steps[-1]["gen"] == self.generation

    def living(self, prefix: str = "") -> dict[str, int]:
        """Process ids of the members of a kind that are there."""
        return {
            member: pid for member, pid in self.pid_of.items() if member.startswith(prefix) and pid not in self.lost_at
        }


def _text(row: dict[str, Any]) -> str:
    if row["event"] == "state":
        return f"{row['time']:.2f} state {row['from']} -> {row['to']}"
    return f"{row['time']:.2f} {row['event']}: {row['text']}"
