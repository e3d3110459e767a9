"""Starting and ending the job's processes on Ray, and watching its nodes."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from planaria.config import JobConfig
from planaria.recipe import Recipe
from planaria.runtime.beacon import BeaconAddress
from planaria.runtime.keeper import KeeperActor
from planaria.runtime.loader import Loader
from planaria.runtime.worker import Worker, WorkerSpec


@dataclass(frozen=True)
class Scaling:
    """What one worker occupies on its node."""

    use_gpu: bool = False
    resources: dict[str, float] = field(default_factory=lambda: {"CPU": 1.0})

    def places(self, node_resources: dict[str, float]) -> int:
        """How many workers a node with these total resources can carry."""
        needs = [(name, amount) for name, amount in self.resources.items() if amount > 0]
        return min((math.floor(node_resources.get(name, 0.0) / amount + 1e-9) for name, amount in needs), default=0)

    def options(self) -> dict[str, Any]:
        """Ray actor options that reserve the resources."""
        rest = {name: amount for name, amount in self.resources.items() if name not in ("CPU", "GPU")}
        return {
            "num_cpus": self.resources.get("CPU", 0.0),
            "num_gpus": self.resources.get("GPU", 0.0),
            "resources": rest or None,
        }


def actor_class(body: type, **options: Any) -> Any:
    """``body`` as a Ray actor class; ray.remote's overloads do not know all of its own options."""
    remote: Any = ray.remote
    return remote(**options)(body)


class Fleet:
    """The only place that creates and kills the job's Ray actors."""

    def __init__(self, job: JobConfig, recipe: Recipe, run_dir: str, scaling: Scaling, beacon: BeaconAddress) -> None:
        self._job, self._recipe, self._run_dir = job, recipe, run_dir
        self._scaling, self._beacon = scaling, beacon
        # The controller owns restarts: an actor that Ray restarted behind its back would hold no state.
        self._worker_class = actor_class(Worker, concurrency_groups={"train": 1, "control": 4})
        self._loader_class = actor_class(Loader, max_concurrency=4)
        self._keeper_class = actor_class(KeeperActor, num_cpus=0)

    def capacity(self, suspects: Collection[str] = ()) -> dict[str, int]:
        """Node id -> workers it can carry, for every living node.

        Ray believes a dead node alive for ten seconds and more; of ``suspects`` the raylet's port is asked.
        """
        return {
            node["NodeID"]: places
            for node in ray.nodes()
            if node["Alive"]
            and (places := self._scaling.places(node["Resources"])) > 0
            and (node["NodeID"] not in suspects or _listens(node["NodeManagerAddress"], node["NodeManagerPort"]))
        }

    def start_worker(self, ident: str, node: str) -> Any:
        """Handle of a new worker process on ``node``; it is not ready yet."""
        spec = WorkerSpec(ident, self._beacon, self._recipe, self._job, self._run_dir, self._scaling.use_gpu)
        return self._worker_class.options(
            name=None,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}} if not self._scaling.use_gpu else None,
            **self._scaling.options(),
        ).remote(spec)

    def start_loader(self, ident: str, node: str) -> Any:
        """Handle of a new loader process, on ``node`` if it fits there; it is not ready yet."""
        return self._loader_class.options(
            max_restarts=0,
            num_cpus=self._job.data.loader_cpus,
            # A loader that needs CPUs may have to go where they are free.
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=self._job.data.loader_cpus > 0),
        ).remote(ident, self._beacon, self._recipe, self._job)

    def start_keeper(self, ident: str, node: str) -> Any:
        """Handle of a new keeper process on ``node``; it is not ready yet."""
        return self._keeper_class.options(
            max_restarts=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(ident, self._beacon, self._job, self._run_dir)

    @staticmethod
    def kill(handle: Any) -> None:
        """End a process; harmless if it is gone."""
        with contextlib.suppress(Exception):
            ray.kill(handle, no_restart=True)


class NodeWatch:
    """Looks at the cluster every ``interval_s`` and tells what each node can carry."""

    def __init__(
        self,
        fleet: Fleet,
        tell: Callable[[dict[str, int]], None],
        suspects: Callable[[], Collection[str]],
        interval_s: float = 1.0,
    ) -> None:
        self._fleet, self._tell, self._suspects, self._interval = fleet, tell, suspects, interval_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="node-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop looking."""
        self._closed.set()
        self._thread.join(10)

    def _watch(self) -> None:
        while True:
            with contextlib.suppress(Exception):  # a look that fails is followed by another
                self._tell(self._fleet.capacity(self._suspects()))
            if self._closed.wait(self._interval):
                return


def _listens(host: str, port: int, timeout_s: float = 2.5) -> bool:
    # A lost SYN is sent again after one second: one lost packet must not cost a node's healthy workers.
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError:
        return False
    return True
