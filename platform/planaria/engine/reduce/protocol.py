"""What an engine asks of the part that joins the replicas, and what that part is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from planaria.config import CommunicationConfig
from planaria.engine.sharded import Shard
from planaria.engine.wire import Wire
from planaria.layout import Layout
from planaria.recipe import StateReader, holds
from planaria.state.boxes import Box

FAR = "dp_replicate"
"""The axis between replicas, whose ranks are farthest from one another."""


@dataclass(frozen=True)
class SyncState:
    """One tensor of what joining the replicas remembers; the fields are those of
    :class:`planaria.engine.protocol.Held`."""

    tensor: str
    global_shape: tuple[int, ...]
    box: Box
    axes: frozenset[str]
    value: Tensor


@dataclass(frozen=True)
class Setting:
    """Who joins what.

    Attributes:
        shards: this rank's parts of the trainable parameters.
        most_replicas: how many replicas another layout of the job may have.
        moments: their state tensors in the optimizer, in the same order on all replicas.
    """

    shards: Sequence[Shard]
    config: CommunicationConfig
    layout: Layout
    mesh: DeviceMesh
    most_replicas: int
    seed: int
    wire: Wire
    moments: Callable[[], Iterator[Tensor]]

    @property
    def replicas(self) -> int:
        """Number of replicas."""
        return self.layout.dp_replicate

    @property
    def replica(self) -> int:
        """Which replica this rank belongs to."""
        return self.layout.coords(self.mesh.get_rank())[FAR]

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that hold the same boxes in all replicas."""
        return self.mesh.get_group(FAR)


class ReplicaSync(Protocol):
    """Joins the replicas: their gradients before an update, or their parameters after some.

    ``reduce`` and ``settle`` are called once a step and are collective over ``dp_replicate``.
    """

    joined: bool
    """Whether the replicas hold one and the same state; if not, there is none that could be kept."""

    def reduce(self) -> None:
        """Between the passes of a step and its global sums: make of this replica's gradients those to apply."""
        ...

    def settle(self, finite: bool, step_done: int) -> None:
        """After the update, which was left out unless ``finite``; ``step_done`` counts this step."""
        ...

    def state(self) -> Iterator[SyncState]:
        """What this rank remembers between steps, always in the same order."""
        ...

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Name and global shape of all that the ranks together remember."""
        ...

    def wanted(self) -> list[tuple[str, Box]]:
        """What :meth:`load` may read."""
        ...

    def load(self, state: StateReader) -> None:
        """Take what was remembered, whatever layout did; what ``state`` does not hold begins afresh.

        The parameters have been loaded before. Called with a state of step 0, too, which holds nothing of it.
        """
        ...


def read_if_held(state: StateReader, tensor: str, box: Box) -> Tensor | None:
    """Part ``box`` of ``tensor``, or None if ``state`` holds no such tensor, as one that older settings wrote."""
    return state.read(tensor, box) if holds(state, tensor) else None


def gradient(shard: Shard) -> Tensor:
    """The local gradient of ``shard``; zeros are put in its place where no sample of this replica reached it."""
    if shard.parameter.grad is None:
        shard.parameter.grad = torch.zeros_like(shard.parameter)
    grad = shard.grad()
    assert grad is not None
    return grad
