"""A Ray cluster whose nodes are hosts of a :class:`Network`: host 0 is the head, the others have one CPU each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import psutil
from tests.support.netns import Network
from tests.support.running import RunningJob

PORT = 6379
START_LIMIT_S = 60.0


class NetworkCluster:
    """``nodes`` Ray nodes beside the head, each started by ``ray start`` in its own namespace."""

    def __init__(self, nodes: int) -> None:
        self.network = Network(nodes + 1)
        self.hosts = range(1, nodes + 1)
        # Short, for Ray's sockets lie in it and their paths may have 107 characters.
        self._folder = Path(tempfile.mkdtemp(prefix="pln"))
        self._raylets: dict[int, subprocess.Popen[bytes]] = {}
        self._others: list[subprocess.Popen[bytes]] = []
        try:
            self._start(0, "--head", f"--port={PORT}", "--num-cpus=0", "--include-dashboard=false")
            self._raylets[0].wait(START_LIMIT_S)
            self._await_head()
            for host in self.hosts:
                self.start(host)
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """Address of the cluster, for a driver on host 0."""
        return f"{self.network.address(0)}:{PORT}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables of everything that runs here."""
        folder = str(self._folder)
        store = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": f"{folder}/gcs"}
        return {"RAY_TMPDIR": folder, "TMPDIR": folder, **store}

    def start(self, host: int) -> None:
        """Start the Ray node of a host."""
        self._start(host, f"--address={self.address}", "--num-cpus=1")

    def mend(self) -> None:
        """Undo all faults, and start the Ray nodes that Ray itself has given up meanwhile."""
        for host in self.hosts:
            self.network.mend(host)
        for host in self.hosts:
            if self._raylets[host].poll() is not None:
                self.network.kill(host)
                self.start(host)

    def host_of(self, job: RunningJob, member: str) -> int:
        """The host on which a member of the job runs."""
        pid = job.pid_of[member]
        return next(host for host in self.hosts if pid in self.network.pids(host))

    def kill_gcs(self) -> Callable[[], None]:
        """SIGKILL the head's global control store, and nothing else; returns the function that starts it again, as
        whoever supervises a head does."""
        process = next(p for p in map(psutil.Process, self.network.pids(0)) if p.name() == "gcs_server")
        command, environment = process.cmdline(), process.environ()
        process.kill()
        process.wait(10)

        def restart() -> None:
            with (self._folder / "gcs.log").open("ab") as log:
                self._others.append(
                    subprocess.Popen([*self.network.prefix(0), *command], env=environment, stdout=log, stderr=log)
                )
            self._await_head()

        return restart

    def close(self) -> None:
        """End everything, and leave nothing."""
        self.network.close()
        for process in [*self._raylets.values(), *self._others]:
            process.wait(10)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, host: int, *options: str) -> None:
        command = [
            *self.network.prefix(host),
            *(str(Path(sys.executable).parent / "ray"), "start", *options),
            *(f"--node-ip-address={self.network.address(host)}", "--object-store-memory=104857600"),
            "--disable-usage-stats",
            # Each its own: names of sockets are taken from the files that are there, and nodes start at once.
            f"--temp-dir={self._folder}/{host}",
            # Of a head whose store dies nothing is left with --block: Ray ends the rest of it.
            *(["--block"] if host else []),
        ]
        with (self._folder / f"host{host}.log").open("ab") as log:
            self._raylets[host] = subprocess.Popen(
                command,
                env=os.environ | self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    def _await_head(self) -> None:
        probe = [
            sys.executable,
            "-c",
            f"import socket; socket.create_connection(({self.network.address(0)!r}, {PORT}), 1)",
        ]
        deadline = time.monotonic() + START_LIMIT_S
        while subprocess.run([*self.network.prefix(0), *probe], capture_output=True).returncode:
            if time.monotonic() > deadline:
                raise TimeoutError((self._folder / "host0.log").read_text(errors="replace")[-3000:])
            time.sleep(0.2)

    def __enter__(self) -> NetworkCluster:
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
