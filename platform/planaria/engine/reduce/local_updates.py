"""Replicas that train for themselves and are joined now and then: local SGD with an outer step, as in DiLoCo.

For H steps no gradient leaves its replica (arXiv:2311.08105). Then, with the parameters a ("anchor") of the outer step
before and those w_i of replica i, in one message:

    d = mean_i(a - w_i);  v = mu v + d;  a = a - lr (d + mu v);  every replica goes on from a

which is Nesterov momentum on the outer gradient d. With mu = 0 and lr = 1 the replicas go on from their mean; if H = 1
and the inner optimizer is SGD, that is synchronous training, since the mean of their updates is the update by the mean.

The moments of the inner optimizer are averaged along with the parameters (one of the three strategies of SlowMo,
arXiv:1910.00643), so that after an outer step the replicas hold one state, which any layout can take up. The anchor
then is the parameters themselves. Only then does :attr:`LocalUpdates.joined` hold, and the job is kept or paused.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from planaria.engine.reduce.buckets import buckets_of
from planaria.engine.reduce.protocol import Setting, SyncState, gradient, read_if_held
from planaria.engine.reduce.together import sum_together
from planaria.recipe import StateReader
from planaria.state.boxes import Box


class LocalUpdates:
    """Joins the replicas after every step that is a multiple of ``length``."""

    def __init__(self, setting: Setting, length: int) -> None:
        self._setting, self._length = setting, length
        self.joined = True
        self._buckets = buckets_of(setting.shards, int(setting.config.bucket_mb * 1e6), 1, 1)
        self._momentum = [bucket.zeros() for bucket in self._buckets]
        self._anchor: list[Tensor] = []

    def reduce(self) -> None:
        """Scale this replica's gradients to those of a mean over its own share of the batch.

        They are its part of the sum over the global batch, of which each replica is taken to have an equal share.
        """
        if self.joined:  # the first step of a round
            self._anchor = [self._parameters(at) for at in range(len(self._buckets))]
            self.joined = False
        torch._foreach_mul_([gradient(shard) for shard in self._setting.shards], float(self._setting.replicas))

    def settle(self, finite: bool, step_done: int) -> None:
        """See :meth:`planaria.engine.reduce.protocol.ReplicaSync.settle`."""
        if step_done % self._length:
            return
        config = self._setting.config
        outer = [anchor - self._parameters(at) for at, anchor in enumerate(self._anchor)]
        self._mean([*outer, *(moment for moment in self._setting.moments() if moment.numel())])
        for at, bucket in enumerate(self._buckets):
            anchor, momentum = self._anchor[at], self._momentum[at]
            momentum.mul_(config.outer_momentum).add_(outer[at])
            anchor.sub_(outer[at].add_(momentum, alpha=config.outer_momentum), alpha=config.outer_lr)
            for shard, part in bucket.views(anchor):
                shard.local().copy_(part)
        self._anchor = []
        self.joined = True

    def state(self) -> Iterator[SyncState]:
        """See :meth:`planaria.engine.reduce.protocol.ReplicaSync.state`."""
        for bucket, momentum in zip(self._buckets, self._momentum, strict=True):
            for shard, part in bucket.views(momentum):
                yield SyncState(_name(shard.name), shard.global_shape, shard.box, shard.axes, part)

    def expected(self) -> dict[str, tuple[int, ...]]:
        """See :meth:`planaria.engine.reduce.protocol.ReplicaSync.expected`."""
        return {_name(shard.name): shard.global_shape for shard in self._setting.shards}

    def wanted(self) -> list[tuple[str, Box]]:
        """See :meth:`planaria.engine.reduce.protocol.ReplicaSync.wanted`."""
        return [(_name(shard.name), shard.box) for shard in self._setting.shards]

    def load(self, state: StateReader) -> None:
        """See :meth:`planaria.engine.reduce.protocol.ReplicaSync.load`."""
        for bucket, momentum in zip(self._buckets, self._momentum, strict=True):
            for shard, part in bucket.views(momentum):
                found = read_if_held(state, _name(shard.name), shard.box) if state.step else None
                part.zero_() if found is None else part.copy_(found)
        self._anchor = []
        self.joined = True

    def _parameters(self, at: int) -> Tensor:
        flat = self._buckets[at].zeros()
        for shard, part in self._buckets[at].views(flat):
            part.copy_(shard.local())
        return flat

    def _mean(self, tensors: list[Tensor]) -> None:
        """Replace each tensor by its mean over the replicas."""
        if self._setting.replicas > 1:
            sum_together(tensors, self._setting)
            torch._foreach_div_(tensors, float(self._setting.replicas))


def _name(parameter: str) -> str:
    return f"sync/outer/{parameter}"
