"""The keeper's Ray actor: one per node, small, without a CPU of its own; it outlives the workers of its node."""

from __future__ import annotations

import os
import threading
from typing import Any

import ray

from planaria.config import JobConfig, vault_root
from planaria.memory.drain import pieces
from planaria.memory.keeper import Keeper
from planaria.memory.shelf import Stack
from planaria.runtime.beacon import Beacon, BeaconAddress
from planaria.runtime.energy import Energy
from planaria.runtime.hello import Hello
from planaria.state.errors import CheckpointError
from planaria.state.vault import Vault

REPORT_S = 1.0
"""Seconds between two looks at how much memory is in use."""


class KeeperActor:
    """Body of the Ray actor."""

    def __init__(self, ident: str, beacon: BeaconAddress, job: JobConfig, run_dir: str) -> None:
        # Snapshots of a run whose controller does not return serve nobody, and must not stay in the node's memory.
        self._beacon = Beacon(beacon, ident, lease_s=job.elastic.orphan_s)
        self._vault = Vault(vault_root(job, run_dir))
        self._node = ray.get_runtime_context().get_node_id()
        self._keeper = Keeper(
            self._node,
            ray.util.get_node_ip_address(),
            beacon.token,
            job.memory.folder,
            job.memory.replicas,
            self._beacon.send,
            self._drain,
        )
        threading.Thread(target=self._report, name="keeper-report", daemon=True).start()

    def ready(self) -> Hello:
        """Where it listens."""
        return Hello(os.getpid(), self._node, self._keeper.address)

    def adopt(self, beacon: BeaconAddress) -> Hello:
        """Belong to the controller at ``beacon``, which has returned."""
        self._beacon.adopt(beacon)
        return self.ready()

    def _drain(self, stack: Stack, buffer: int, message: dict[str, Any]) -> None:
        """Write one rank's shard, and tell the controller, which commits the checkpoint once all are written."""
        told = {key: message[key] for key in ("gen", "owner", "step", "token", "writer")}
        try:
            writer = self._vault.writer(message["step"], message["token"])
            slices = writer.write_shard(message["writer"], pieces(stack, buffer))
        except CheckpointError as error:
            self._beacon.send({"t": "drain_failed", "problem": str(error), **told})
            return
        except Exception as error:  # a bug must not leave the controller waiting
            self._beacon.send({"t": "drain_failed", "problem": f"{type(error).__name__}: {error}", **told})
            return
        expected = stack.table.expected if message["writer"] == 0 else None
        rows = [item.to_json() for item in slices]
        self._beacon.send({"t": "drained", "slices": rows, "expected": expected, **told})

    def _report(self) -> None:
        last, energy = -1, Energy()
        pause = threading.Event()
        while not pause.wait(REPORT_S):
            used = self._keeper.shelf.nbytes
            if used != last:
                last = used
                self._beacon.send({"t": "memory", "node": self._node, "used": used})
            if joules := energy.read():
                self._beacon.send({"t": "energy", "joules": joules})
