"""PowerSGD: replicas add up gradients as products of two thin factors (arXiv:1905.13727, algorithm 1 and 2).

For the local part M_i [A, B] of a gradient (plus the error of the step before) on replica i, and a left factor P
[A, r] that is the same on all replicas:

    Q = orthogonalise(sum_i M_i^T P)      [B, r]
    P = sum_i M_i Q                       [A, r]
    the sum is taken to be P Q^T; replica i keeps the error M_i - (M_i Q) Q^T

This is one step of power iteration, warm-started with the P of the step before. The paper starts with Q; here P is
what is kept, because its rows are those of the gradient: where FSDP2 or tensor parallelism cuts rows, P is cut alike,
and goes to any layout through the slice index. Errors of the replicas and P Q^T add up to the sum of all M_i, whatever
Q is, so that nothing is lost but time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from planaria.engine.initial import seed_of
from planaria.engine.reduce.buckets import buckets_of
from planaria.engine.reduce.feedback import Feedback
from planaria.engine.reduce.near import agree_near
from planaria.engine.reduce.protocol import Setting, SyncState, gradient, read_if_held
from planaria.engine.reduce.together import sum_together
from planaria.engine.sharded import Shard
from planaria.layout import Layout
from planaria.recipe import StateReader
from planaria.state.boxes import Box


@dataclass(frozen=True)
class Factor:
    """The left factor of one parameter: its name, shape and box in the slice index."""

    tensor: str
    global_shape: tuple[int, int]
    box: Box


def factor_of(shard: Shard, layout: Layout, at_tp: int, rank: int) -> Factor | None:
    """The left factor of ``shard``, or None where thin factors would not halve the bytes; alike on all ranks.

    Tensor parallelism that cuts columns makes matrices of its own, whose factors lie side by side.
    """
    if len(shard.global_shape) < 2:
        return None
    rows, *rest = shard.global_shape
    columns = 1
    for size in rest:
        columns *= size
    cut = shard.cut.dim
    parts = layout.tp if cut is not None and cut > 0 else 1
    local_rows = -(-rows // (layout.dp_shard * (layout.tp if cut == 0 else 1)))
    r = min(rank, rows, columns // parts)
    if 2 * r * (local_rows + columns // parts) > local_rows * (columns // parts):
        return None
    first = at_tp * r if parts > 1 else 0
    box = Box((shard.box.offset[0], first), (shard.box.shape[0], r))
    return Factor(f"sync/left.{r}.{parts}/{shard.name}", (rows, parts * r), box)


class PowerSGD:
    """Sums of gradients through thin factors, with error feedback and a warm start; small tensors are sent plain."""

    joined = True

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        at_tp = setting.layout.coords(setting.mesh.get_rank())["tp"]
        self._shards = [shard for shard in setting.shards if shard.box.numel]
        self._factors = {
            shard.name: factor
            for shard in setting.shards
            if (factor := factor_of(shard, setting.layout, at_tp, setting.config.powersgd_rank)) is not None
        }
        self._left = {s.name: self._fresh(s) for s in self._shards if s.name in self._factors}
        # One flat tensor per shard: what is sent is laid out anew in every step.
        self._buckets = buckets_of(self._shards, 0, 1, 1)
        self._feedback = Feedback(setting, self._buckets)
        self._pending: dict[str, Tensor] = {}

    def reduce(self) -> None:
        """See :meth:`planaria.engine.reduce.protocol.ReplicaSync.reduce`."""
        flats = []
        for at, bucket in enumerate(self._buckets):
            flat = bucket.zeros()
            for shard, part in bucket.views(flat):
                part.copy_(gradient(shard))
            self._feedback.compensate(at, flat)
            flats.append(flat)
        self._feedback.keep(flats)
        if self._setting.replicas == 1:
            for shard, flat in zip(self._shards, flats, strict=True):
                gradient(shard).copy_(flat.view(shard.box.shape))
                flat.zero_()
            return
        matrices: dict[str, Tensor] = {}
        plain: list[Tensor] = []
        for shard, flat in zip(self._shards, flats, strict=True):
            if shard.name in self._left:
                matrices[shard.name] = flat.view(shard.box.shape[0], -1)
            else:
                grad = gradient(shard).copy_(flat.view(shard.box.shape))
                flat.zero_()  # it arrives whole
                plain.append(grad)
        sum_together(plain, self._setting)
        right = {name: m_AB.T @ self._left[name] for name, m_AB in matrices.items()}
        sum_together(list(right.values()), self._setting)
        right = {name: torch.linalg.qr(q_BR).Q for name, q_BR in right.items()}
        left = {name: m_AB @ right[name] for name, m_AB in matrices.items()}
        for name, m_AB in matrices.items():
            m_AB -= left[name] @ right[name].T  # what this replica did not get across
        sum_together(list(left.values()), self._setting)
        for shard in self._shards:
            if shard.name in left:
                gradient(shard).copy_((left[shard.name] @ right[shard.name].T).view(shard.box.shape))
        self._pending = left
        agree_near(self._setting)

    def settle(self, finite: bool, step_done: int) -> None:
        """See :meth:`planaria.engine.reduce.protocol.ReplicaSync.settle`."""
        self._feedback.settle(finite)
        if finite:
            self._left |= self._pending
        self._pending = {}

    def state(self) -> Iterator[SyncState]:
        """See :meth:`planaria.engine.reduce.protocol.ReplicaSync.state`."""
        yield from self._feedback.state()
        for shard in self._shards:
            if (factor := self._factors.get(shard.name)) is not None:
                yield SyncState(factor.tensor, factor.global_shape, factor.box, shard.axes, self._left[shard.name])

    def expected(self) -> dict[str, tuple[int, ...]]:
        """See :meth:`planaria.engine.reduce.protocol.ReplicaSync.expected`."""
        left: dict[str, tuple[int, ...]] = {factor.tensor: factor.global_shape for factor in self._factors.values()}
        return self._feedback.expected() | left

    def wanted(self) -> list[tuple[str, Box]]:
        """See :meth:`planaria.engine.reduce.protocol.ReplicaSync.wanted`."""
        return self._feedback.wanted() + [(factor.tensor, factor.box) for factor in self._factors.values()]

    def load(self, state: StateReader) -> None:
        """See :meth:`planaria.engine.reduce.protocol.ReplicaSync.load`."""
        self._feedback.load(state)
        for shard in self._shards:
            if (factor := self._factors.get(shard.name)) is not None:
                found = read_if_held(state, factor.tensor, factor.box) if state.step else None
                self._left[shard.name] = self._fresh(shard) if found is None else found.to(shard.local())

    def _fresh(self, shard: Shard) -> Tensor:
        """The first left factor: a random one, the same in every layout whose tensor parallelism cuts alike."""
        factor = self._factors[shard.name]
        dice = torch.Generator().manual_seed(seed_of(self._setting.seed, factor.tensor))
        whole = torch.randn(factor.global_shape, generator=dice)
        return whole[factor.box.relative_to(Box.whole(factor.global_shape))].to(shard.local())
