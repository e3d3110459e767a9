"""Error feedback: what compression left out of a step is added to the next one (EF-SGD, arXiv:1901.09847).

Each replica has an error of its own. In the slice index the error of replica ``d`` is the tensor ``sync/error.d/NAME``
with the shape of the parameter NAME, so every error can be read by box in any layout. Only the sum over the replicas
means anything: it is the gradient mass that is still to be applied. With as many replicas as before each gets back
its own error, to the bit; with another number each gets an equal share of the sum, so that no mass is lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from torch import Tensor

from planaria.engine.reduce.buckets import Bucket
from planaria.engine.reduce.protocol import FAR, Setting, SyncState, read_if_held
from planaria.engine.sharded import Shard
from planaria.recipe import StateReader
from planaria.state.boxes import Box


def error_name(replica: int, parameter: str) -> str:
    """Name in the slice index."""
    return f"sync/error.{replica}/{parameter}"


class Feedback:
    """The errors of this rank, one flat tensor per bucket.

    New errors take effect in :meth:`settle` only: a step that is skipped leaves the old ones.
    """

    def __init__(self, setting: Setting, buckets: Sequence[Bucket]) -> None:
        self._setting, self._buckets = setting, buckets
        self._errors = [bucket.zeros() for bucket in buckets]
        self._pending: list[Tensor] = []

    def compensate(self, at: int, flat: Tensor) -> None:
        """Add the error of bucket ``at`` to its gradients."""
        flat += self._errors[at]

    def keep(self, errors: list[Tensor]) -> None:
        """Remember the new errors of all buckets until :meth:`settle`."""
        self._pending = errors

    def settle(self, finite: bool) -> None:
        """The step was carried out if it was ``finite``."""
        if finite and self._pending:
            self._errors = self._pending
        self._pending = []

    def state(self) -> Iterator[SyncState]:
        """See :meth:`planaria.engine.reduce.protocol.ReplicaSync.state`."""
        for shard, error in self._views():
            name = error_name(self._setting.replica, shard.name)
            yield SyncState(name, shard.global_shape, shard.box, shard.axes - {FAR}, error)

    def expected(self) -> dict[str, tuple[int, ...]]:
        """See :meth:`planaria.engine.reduce.protocol.ReplicaSync.expected`."""
        replicas, shards = self._setting.replicas, self._setting.shards
        return {error_name(replica, s.name): s.global_shape for replica in range(replicas) for s in shards}

    def wanted(self) -> list[tuple[str, Box]]:
        """See :meth:`planaria.engine.reduce.protocol.ReplicaSync.wanted`."""
        return [(error_name(replica, s.name), s.box) for replica in self._candidates() for s in self._setting.shards]

    def load(self, state: StateReader) -> None:
        """See :meth:`planaria.engine.reduce.protocol.ReplicaSync.load`."""
        setting = self._setting
        for error in self._errors:
            error.zero_()
        if state.step == 0:
            return
        for shard, error in self._views():
            found: list[Tensor] = []
            for replica in itertools.count():
                part = read_if_held(state, error_name(replica, shard.name), shard.box)
                if part is None:
                    break
                found.append(part)
            if len(found) == setting.replicas:
                error.copy_(found[setting.replica])
            elif found:
                for part in found:
                    error += part.to(error)
                error /= setting.replicas

    def _candidates(self) -> range:
        """Replicas that may have left an error: the planner makes no more of them than are preferred."""
        return range(max(self._setting.replicas, self._setting.most_replicas))

    def _views(self) -> Iterator[tuple[Shard, Tensor]]:
        for bucket, error in zip(self._buckets, self._errors, strict=True):
            yield from bucket.views(error)
