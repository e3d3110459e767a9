"""The running job and its cluster, as faults see and touch them: what its records say, and who its processes are."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from ray.core.generated.autoscaler_pb2 import DrainNodeReason
from tests.chaos.fault import Blow, row_text
from tests.chaos.world import World
from tests.support.lines import Lines

from planaria.runtime.local_cluster import LocalCluster

PREEMPTION = DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
GLANCE_S = 0.02
"""Seconds between two looks at the records."""


class Trouble(AssertionError):
    """The job did not do what it must; the text holds the last events."""


class Stage:
    """Follows ``events.jsonl`` and ``metrics.jsonl`` of a run in ``run_dir``, and knows the cluster's nodes by name.

    Args:
        cluster: without nodes yet; those of ``world`` are started here.
        checkpoint_every: steps between checkpoints.
        ended: tells that the job's own command has ended, which nobody asked for.
    """

    def __init__(
        self, cluster: LocalCluster, world: World, run_dir: Path, checkpoint_every: int, ended: Callable[[], bool]
    ) -> None:
        self.cluster, self.run_dir, self._ended = cluster, run_dir, ended
        self.checkpoint_every = checkpoint_every
        self.ballast: Path | None = None
        """File that fills the disk of the checkpoints; None where there is no small disk."""
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
        self._nodes: dict[str, Any] = {}
        for name, cpus in world.nodes.items():
            self.add_node(name, cpus)

    # -- what the records say ----------------------------------------------------------------------

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
            case "lost":
                self.lost_at[event["pid"]] = event["time"]
            case "generation":
                self.generations.append(event)
            case "recovered":
                self.recovered.append(event)

    def until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Look until ``condition`` holds.

        Raises:
            Trouble: it does not within ``seconds``, or the job ended.
        """
        deadline = time.monotonic() + seconds
        while True:
            self.look()
            if condition():
                return
            if self._ended():
                raise Trouble(f"the job ended while waiting for {what}\n{self.excerpt()}")
            if time.monotonic() > deadline:
                raise Trouble(f"{what}: not within {seconds:g} s\n{self.excerpt()}")
            time.sleep(GLANCE_S)

    def excerpt(self, count: int = 40) -> str:
        """The last events, for a person."""
        return "\n".join(row_text(event) for event in list(self.events)[-count:])

    @property
    def step(self) -> int:
        """Steps that were completed and not undone."""
        return self.steps[-1]["step"] + 1 if self.steps else 0

    @property
    def generation(self) -> int:
        """Number of the newest generation."""
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

    # -- who is who --------------------------------------------------------------------------------

    def pick_worker(self, turn: float) -> int:
        """Process id of a member of the newest generation; ``turn`` in [0, 1) says which."""
        workers = self.workers_of(self.generation)
        return self.pid_of[workers[int(turn * len(workers))]]

    def pick(self, prefix: str, turn: float) -> int:
        """Process id of a living member of a kind."""
        pids = list(self.living(prefix).values())
        return pids[int(turn * len(pids))]

    def members_on(self, *names: str) -> list[int]:
        """Living members on nodes."""
        ids = {self._nodes[name].node_id for name in names}
        return [pid for member, pid in self.living().items() if self.node_of[member] in ids]

    def matters(self, pids: Sequence[int]) -> bool:
        """Whether the loss of these processes ends the newest generation."""
        if not self.generations:
            return False
        ranks = self.workers_of(self.generation)
        nodes = {self.node_of[member] for member in ranks}
        hit = [self.member_of[pid] for pid in pids]
        return any(name in ranks or (name.startswith("keeper-") and self.node_of[name] in nodes) for name in hit)

    def blow(self, victims: Sequence[int] = (), breaks: bool | None = None) -> Blow:
        """A fault that is about to be injected."""
        breaks = self.matters(victims) if breaks is None else breaks
        return Blow(time.time(), self.generation, tuple(victims), breaks)

    # -- what faults do ----------------------------------------------------------------------------

    def add_node(self, name: str, cpus: int) -> None:
        """Start a node."""
        self._nodes[name] = self.cluster.add_node(cpus)

    def kill_nodes(self, *names: str) -> None:
        """End nodes as a power cut would."""
        self.cluster.kill_node(*(self._nodes.pop(name) for name in names))

    def drain_node(self, name: str, deadline_s: float) -> None:
        """Tell Ray that a node will be gone in ``deadline_s``, as a spot notice does."""
        node = self._nodes[name]
        accepted, why = node.get_gcs_client().drain_node(
            node.node_id, PREEMPTION, "chaos", int((time.time() + deadline_s) * 1000), timeout=10
        )
        if not accepted:
            raise Trouble(f"Ray does not drain {name}: {why}")

    def node(self, name: str) -> Any:
        """A node of the cluster."""
        return self._nodes[name]

    def controller(self) -> int:
        """Process id of the controller."""
        return next(iter(actors("Controller")))


def actors(*names: str) -> dict[int, str]:
    """Ray actors of these classes below this process, by process id with their titles."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            title = process.cmdline()[0]
            # ray::Class while idle, ray::Class.method while at work
            if title.removeprefix("ray::").partition(".")[0] in names and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = title
    return found


def send(pid: int, sign: signal.Signals) -> None:
    """Signal a process; harmless if it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, sign)


def alive(pid: int) -> bool:
    """Whether a process runs, frozen or not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False
