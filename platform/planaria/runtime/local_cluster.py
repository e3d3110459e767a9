"""Several Ray nodes on one machine, one of which can die as a machine dies: all its processes at once."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

OBJECT_STORE_BYTES = 100 * 1024 * 1024


@contextlib.contextmanager
def _starting_nodes(folder: str) -> Iterator[None]:
    """Ray processes started here put their temporary files into ``folder``, and this process keeps its SIGTERM
    handler (every Ray node that starts here installs its own)."""
    handler, before = signal.getsignal(signal.SIGTERM), os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = folder
    try:
        yield
    finally:
        _restore("TMPDIR", before)
        signal.signal(signal.SIGTERM, handler)


def _restore(variable: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(variable, None)
    else:
        os.environ[variable] = value


class LocalCluster:
    """A head node without places for workers, and ``nodes`` nodes with ``cpus`` CPUs each.

    Used by the demo, the benchmarks and the tests. Ends only processes that it started.
    """

    def __init__(self, nodes: int, cpus: int = 1, *, dashboard: bool = False, connect: bool = True) -> None:
        # A local cluster on the loopback needs no token, and must not write one into the home directory.
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self._cpus = cpus
        self.nodes: list[Any] = []
        # Everything that Ray writes goes into a folder of this cluster's own, also the address by which a bare
        # ray.init() finds "the" cluster: another one on this machine is not disturbed. The path is short, for
        # Ray's sockets lie in it and their paths may have 107 characters.
        self._folder = tempfile.mkdtemp(prefix="planaria-")
        (Path(self._folder) / "ray").mkdir()
        self._ray_tmpdir = os.environ.get("RAY_TMPDIR")
        os.environ["RAY_TMPDIR"] = self._folder
        self._common = {"object_store_memory": OBJECT_STORE_BYTES}
        # Ray's own ports for the head's dashboard and agent are for one cluster per machine: without its agent, a head
        # takes no jobs. These are free ones.
        ports = {"dashboard_port": None, "dashboard_agent_listen_port": 0}
        head = {"num_cpus": 0, "include_dashboard": dashboard, **ports, **self._common}
        with _starting_nodes(self._folder):
            self.cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(nodes):
            self.add_node()
        if connect:
            ray.init(address=self.cluster.address, log_to_driver=False, logging_level=logging.WARNING)

    @property
    def address(self) -> str:
        """Address for ``ray.init``."""
        return str(self.cluster.address)

    @property
    def dashboard(self) -> str:
        """Address of the dashboard, which takes submitted jobs."""
        return f"http://{self.cluster.webui_url}"

    def add_node(self, cpus: int | None = None) -> Any:
        """Start one more node, with ``cpus`` CPUs if its size differs."""
        count = self._cpus if cpus is None else cpus
        with _starting_nodes(self._folder):
            node = self.cluster.add_node(num_cpus=count, wait=False, **self._common)
        self.nodes.append(node)
        return node

    def processes_of(self, node: Any) -> list[psutil.Process]:
        """The node's raylet and everything that it started (workers, agents)."""
        found: list[psutil.Process] = []
        for infos in node.all_processes.values():
            for info in infos:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process = psutil.Process(info.process.pid)
                    found += [process, *process.children(recursive=True)]
        return found

    def kill_node(self, *nodes: Any) -> list[int]:
        """SIGKILL every process of the nodes at once, as a power cut would; returns the pids."""
        victims = [process for node in nodes for process in self.processes_of(node)]
        # Freeze first: none may notice that another is gone, as none would on a machine that lost its power.
        for sign in (signal.SIGSTOP, signal.SIGKILL):
            for process in victims:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(sign)
        for node in nodes:
            self.nodes.remove(node)
            with contextlib.suppress(Exception):
                self.cluster.worker_nodes.discard(node)
        psutil.wait_procs(victims, timeout=5)
        return [process.pid for process in victims]

    def node_of(self, node_id: str) -> Any:
        """The node with this Ray id."""
        return next(node for node in self.nodes if node.node_id == node_id)

    def close(self) -> None:
        """Disconnect and end every node."""
        started = [process for node in [*self.nodes, self.cluster.head_node] for process in self.processes_of(node)]
        ray.shutdown()
        self.cluster.shutdown()
        _, alive = psutil.wait_procs(started, timeout=10)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _restore("RAY_TMPDIR", self._ray_tmpdir)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
