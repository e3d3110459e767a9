"""Replicas whose gradients are added up in bfloat16, or in int8 with error feedback."""

from __future__ import annotations

from collections.abc import Iterator

from planaria.engine.reduce.buckets import buckets_of
from planaria.engine.reduce.codecs import Codec
from planaria.engine.reduce.exchange import sum_encoded
from planaria.engine.reduce.feedback import Feedback
from planaria.engine.reduce.near import agree_near
from planaria.engine.reduce.protocol import Setting, SyncState, gradient
from planaria.recipe import StateReader
from planaria.state.boxes import Box


class EncodedSync:
    """Sums of gradients with encoded pieces on the wire (:func:`planaria.engine.reduce.exchange.sum_encoded`).

    With one replica nothing is sent or lost; an error that more of them left behind is applied in the first step.
    """

    joined = True

    def __init__(self, setting: Setting, codec: Codec, *, feedback: bool) -> None:
        self._setting, self._codec = setting, codec
        limit = int(setting.config.bucket_mb * 1e6)
        self._buckets = buckets_of(setting.shards, limit, codec.block, setting.replicas)
        self._feedback = Feedback(setting, self._buckets) if feedback else None

    def reduce(self) -> None:
        """See :meth:`planaria.engine.reduce.protocol.ReplicaSync.reduce`."""
        setting, feedback = self._setting, self._feedback
        flats = []
        for at, bucket in enumerate(self._buckets):
            flat = bucket.zeros()
            for shard, part in bucket.views(flat):
                part.copy_(gradient(shard))
            if feedback is not None:
                feedback.compensate(at, flat)
            flats.append(flat)
        if setting.replicas == 1:
            sums, errors = flats, [flat.new_zeros(flat.shape) for flat in flats]
        else:
            sums = sum_encoded(flats, self._codec, setting.group, setting.wire, feedback=feedback is not None)
            errors = flats
        for bucket, total in zip(self._buckets, sums, strict=True):
            for shard, part in bucket.views(total):
                gradient(shard).copy_(part)
        if feedback is not None:
            feedback.keep(errors)
        agree_near(setting)

    def settle(self, finite: bool, step_done: int) -> None:
        """See :meth:`planaria.engine.reduce.protocol.ReplicaSync.settle`."""
        if self._feedback is not None:
            self._feedback.settle(finite)

    def state(self) -> Iterator[SyncState]:
        """See :meth:`planaria.engine.reduce.protocol.ReplicaSync.state`."""
        return iter(()) if self._feedback is None else self._feedback.state()

    def expected(self) -> dict[str, tuple[int, ...]]:
        """See :meth:`planaria.engine.reduce.protocol.ReplicaSync.expected`."""
        return {} if self._feedback is None else self._feedback.expected()

    def wanted(self) -> list[tuple[str, Box]]:
        """See :meth:`planaria.engine.reduce.protocol.ReplicaSync.wanted`."""
        return [] if self._feedback is None else self._feedback.wanted()

    def load(self, state: StateReader) -> None:
        """See :meth:`planaria.engine.reduce.protocol.ReplicaSync.load`."""
        if self._feedback is not None:
            self._feedback.load(state)
