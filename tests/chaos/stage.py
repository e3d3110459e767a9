"""The running job and its cluster, as faults see and touch them: who its processes are, and what is on which node."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from ray.core.generated.autoscaler_pb2 import DrainNodeReason
from tests.chaos.fault import Blow
from tests.chaos.world import World
from tests.support.running import RunningJob, Trouble

from planaria.runtime.local_cluster import LocalCluster

PREEMPTION = DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION


class Stage(RunningJob):
    """A job on a local cluster whose nodes are known by name.

    Args:
        cluster: without nodes yet; those of ``world`` are started here.
        run_dir: of the job.
        checkpoint_every: steps between checkpoints.
        ended: tells that the job's own command has ended, which nobody asked for.
    """

    def __init__(
        self, cluster: LocalCluster, world: World, run_dir: Path, checkpoint_every: int, ended: Callable[[], bool]
    ) -> None:
        super().__init__(run_dir, ended)
        self.cluster = cluster
        self.checkpoint_every = checkpoint_every
        self.ballast: Path | None = None
        """File that fills the disk of the checkpoints; None where there is no small disk."""
        self._nodes: dict[str, Any] = {}
        for name, cpus in world.nodes.items():
            self.add_node(name, cpus)

    # -- who is who --------------------------------------------------------------------------------

    def pick_worker(self, turn: float) -> int:
        """Process id of a member of the newest generation; ``turn`` in [0, 1) says which."""
        workers = self.workers_of(self.generation)
        return self.pid_of[workers[int(turn * len(workers))]]

    def pick(self, prefix: str, turn: float) -> int:
        """Process id of a living member of a kind; waits for one, should there be none just now."""
        self.until(lambda: bool(self.living(prefix)), 60, f"a {prefix.rstrip('-')}")
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

    def no_rollback_since(self, moment: float) -> None:
        """Fail if completed steps were redone since a moment."""
        redone = [event for event in self.events if event["event"] == "rollback" and event["time"] > moment]
        assert not redone, f"a planned departure cost steps: {redone[0]['text']}"

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
        """Process id of the controller; 0 while it is gone."""
        return next(iter(actors("Controller")), 0)


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
