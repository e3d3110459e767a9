"""The local cluster, waited for: a job that starts on half a cluster would measure something else."""

from __future__ import annotations

import time
from typing import Any

import ray

from planaria.runtime.local_cluster import LocalCluster

LIMIT_S = 60.0


class BenchCluster(LocalCluster):
    """A local cluster that knows which node a process belongs to."""

    def __enter__(self) -> BenchCluster:
        return self

    def node_with(self, pid: int) -> Any:
        """The node that runs process ``pid``."""
        return next(node for node in self.nodes if pid in {process.pid for process in self.processes_of(node)})


def local_cluster(nodes: int) -> BenchCluster:
    """A cluster of ``nodes`` living nodes beside the head."""
    cluster = BenchCluster(nodes)
    deadline = time.monotonic() + LIMIT_S
    while sum(node["Alive"] for node in ray.nodes()) < nodes + 1:
        if time.monotonic() > deadline:
            cluster.close()
            raise TimeoutError(f"{nodes} local nodes did not come up within {LIMIT_S:.0f} s")
        time.sleep(0.2)
    return cluster
