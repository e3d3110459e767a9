"""Replicas whose gradients FSDP2 adds up by itself, uncompressed and while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Iterator

from planaria.engine.reduce.protocol import FAR, Setting, SyncState
from planaria.engine.wire import all_reduce_bytes
from planaria.recipe import StateReader
from planaria.state.boxes import Box


class PlainSync:
    """Does nothing but count: FSDP2 all-reduces each unit's shard once a step, padded to equal rows per rank."""

    joined = True

    def __init__(self, setting: Setting) -> None:
        self._wire = setting.wire
        self._nbytes = 0
        layout = setting.layout
        if layout.dp_replicate == 1:
            return
        padded = 0
        for shard in setting.shards:
            whole = shard.parameter.shape  # of the tensor-parallel part
            rows = -(-whole[0] // layout.dp_shard)
            padded += rows * whole[1:].numel() * shard.local().element_size()
        self._nbytes = all_reduce_bytes(padded, layout.dp_replicate)

    def reduce(self) -> None:
        """See :meth:`planaria.engine.reduce.protocol.ReplicaSync.reduce`."""
        self._wire.add(FAR, self._nbytes)

    def settle(self, finite: bool, step_done: int) -> None:
        """See :meth:`planaria.engine.reduce.protocol.ReplicaSync.settle`."""

    def state(self) -> Iterator[SyncState]:
        """See :meth:`planaria.engine.reduce.protocol.ReplicaSync.state`."""
        return iter(())

    def expected(self) -> dict[str, tuple[int, ...]]:
        """See :meth:`planaria.engine.reduce.protocol.ReplicaSync.expected`."""
        return {}

    def wanted(self) -> list[tuple[str, Box]]:
        """See :meth:`planaria.engine.reduce.protocol.ReplicaSync.wanted`."""
        return []

    def load(self, state: StateReader) -> None:
        """See :meth:`planaria.engine.reduce.protocol.ReplicaSync.load`."""
