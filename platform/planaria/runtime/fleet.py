"""Starting and ending the job's processes on Ray, and watching its nodes."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from planaria.config import JobConfig
from planaria.recipe import Recipe
from planaria.runtime.beacon import BeaconAddress
from planaria.runtime.keeper import KeeperActor
from planaria.runtime.loader import Loader
from planaria.runtime.seat import Seat
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
    """The only place that creates and kills the job's Ray actors.

    They are detached and have names, so that they outlive their controller and can be found by the one that returns;
    they end themselves when none does (:mod:`planaria.runtime.beacon`).

    Args:
        job, recipe, run_dir: what every process is told.
        scaling: what a worker occupies.
        beacon: where the controller listens.
        namespace: Ray namespace of this run's own; an actor's name there is its member's.
    """

    def __init__(
        self, job: JobConfig, recipe: Recipe, run_dir: str, scaling: Scaling, beacon: BeaconAddress, namespace: str
    ) -> None:
        self._job, self._recipe, self._run_dir = job, recipe, run_dir
        self._scaling, self._beacon, self._namespace = scaling, beacon, namespace
        self._worker_class = actor_class(Worker, concurrency_groups={"train": 1, "control": 4})
        self._loader_class = actor_class(Loader, max_concurrency=4)
        self._seat_class = actor_class(Seat, max_concurrency=2)
        self._keeper_class = actor_class(KeeperActor, num_cpus=0)

    def look(self, suspects: Collection[str] = ()) -> tuple[dict[str, int], dict[str, str]]:
        """(node id -> workers it can carry, node id -> its address), of living nodes; the first of those with places.

        Ray believes a dead node alive for ten seconds and more; of ``suspects`` the raylet's port is asked.
        """
        living = [
            node
            for node in ray.nodes()
            if node["Alive"]
            and (node["NodeID"] not in suspects or _listens(node["NodeManagerAddress"], node["NodeManagerPort"]))
        ]
        places = {node["NodeID"]: self._scaling.places(node["Resources"]) for node in living}
        hosts = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in living}
        return {node: count for node, count in places.items() if count > 0}, hosts

    @property
    def standbys(self) -> int:
        """Standbys that each node should have."""
        wanted = self._job.elastic.standbys
        return int(self._scaling.use_gpu) if wanted is None else wanted

    @staticmethod
    def notices() -> dict[str, float | None]:
        """Nodes that Ray is draining (a spot notice, SIGTERM of a pod, the autoscaler, ``ray drain-node``), with the
        moment at which they go, as ``time.monotonic()``; None if no deadline was given."""
        ahead = time.monotonic() - time.time()
        draining: dict[str, int] = ray._private.state.state.get_draining_nodes()  # no public way yet
        return {node: at / 1000 + ahead if at else None for node, at in draining.items()}

    def demand(self, workers: int) -> None:
        """Tell Ray's autoscaler that the job can use so many workers, whatever runs now; 0: it needs none any more."""
        if not self._job.elastic.autoscale:
            return
        bundle = {name: math.ceil(amount) for name, amount in self._scaling.resources.items() if amount > 0}
        with contextlib.suppress(Exception):  # a cluster without an autoscaler has nobody to hear it
            request_resources(bundles=[bundle] * workers)

    def start_worker(self, ident: str, node: str) -> Any:
        """Handle of a new worker process on ``node``; it is not ready yet."""
        return self._start_worker(ident, node, self._scaling.options())

    def start_standby(self, ident: str, node: str) -> Any:
        """Handle of a worker process that waits for a place on ``node``, and occupies nothing until then."""
        return self._start_worker(ident, node, {"num_cpus": 0, "num_gpus": 0}, standby=True)

    def start_seat(self, ident: str, node: str) -> Any:
        """Handle of a process that does nothing but occupy what one worker uses."""
        return self._seat_class.options(
            **self._identity(ident),
            **self._scaling.options(),
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        ).remote(ident, self._beacon, self._job.elastic.orphan_s)

    def _start_worker(self, ident: str, node: str, resources: dict[str, Any], standby: bool = False) -> Any:
        gpu = self._scaling.use_gpu
        spec = WorkerSpec(ident, self._beacon, self._recipe, self._job, self._run_dir, gpu, standby)
        return self._worker_class.options(
            **self._identity(ident),
            max_task_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}} if not self._scaling.use_gpu else None,
            **resources,
        ).remote(spec)

    def start_loader(self, ident: str, node: str) -> Any:
        """Handle of a new loader process, on ``node`` if it fits there; it is not ready yet."""
        return self._loader_class.options(
            **self._identity(ident),
            num_cpus=self._job.data.loader_cpus,
            # A loader that needs CPUs may have to go where they are free.
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=self._job.data.loader_cpus > 0),
        ).remote(ident, self._beacon, self._recipe, self._job)

    def start_keeper(self, ident: str, node: str) -> Any:
        """Handle of a new keeper process on ``node``; it is not ready yet."""
        return self._keeper_class.options(
            **self._identity(ident), scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(ident, self._beacon, self._job, self._run_dir)

    def find(self, ident: str) -> Any | None:
        """Handle of a process that an earlier life of the controller started; None if it is gone."""
        try:
            return ray.get_actor(ident, self._namespace)
        except ValueError:
            return None

    def _identity(self, ident: str) -> dict[str, Any]:
        # The controller owns restarts: an actor that Ray restarted behind its back would hold no state.
        return {"name": ident, "namespace": self._namespace, "lifetime": "detached", "max_restarts": 0}

    @staticmethod
    def kill(handle: Any) -> None:
        """End a process; harmless if it is gone."""
        with contextlib.suppress(Exception):
            ray.kill(handle, no_restart=True)


class NodeWatch:
    """Looks at the cluster every ``interval_s``; tells what each node can carry, which are about to leave, and where
    each node is."""

    def __init__(
        self,
        fleet: Fleet,
        tell: Callable[[dict[str, int], dict[str, float | None], dict[str, str]], None],
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
                capacity, hosts = self._fleet.look(self._suspects())
                self._tell(capacity, self._fleet.notices(), hosts)
            if self._closed.wait(self._interval):
                return


def _listens(host: str, port: int, timeout_s: float = 2.5) -> bool:
    # A lost SYN is sent again after one second: one lost packet must not cost a node's healthy workers.
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError:
        return False
    return True
