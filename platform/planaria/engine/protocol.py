"""What the runtime asks of an engine: one optimizer step on one layout, and the state in the slice index."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from planaria.config import JobConfig
from planaria.engine.wire import Wire
from planaria.layout import Layout
from planaria.recipe import MicroBatch, Recipe, StateReader
from planaria.state.boxes import Box
from planaria.state.replicas import Comparison
from planaria.state.writer import Piece

UPDATES = "optim/updates"
"""Name of the scalar that counts the optimizer's updates."""
SCALE, GOOD_STEPS = "optim/scaler/scale", "optim/scaler/good_steps"
"""Names of the scalars that the search for a loss scale remembers, where there is one (``train.precision: fp16``)."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; equal on all ranks but for ``compute_s``."""

    loss: float
    """Mean loss per target over the global batch."""
    grad_norm: float
    lr: float
    targets: int
    skipped: bool
    """True if the gradient was not finite: no rank has changed its parameters."""
    votes: tuple[int, ...] = ()
    """Sums over all ranks of what each one's ``poll`` said."""
    compute_s: float | None = None
    """How long this rank itself needs, waiting for others left out (:mod:`planaria.engine.compute_time`)."""
    overflow: bool = False
    """True if it was skipped since the scaled gradient left the range of half precision: the search for a loss scale,
    and no fault of data or weights."""
    loss_scale: float | None = None
    """The factor on the loss in this step, where there is one (``train.precision: fp16``)."""


@dataclass(frozen=True)
class Held:
    """One tensor of the training state as this rank holds it.

    Attributes:
        tensor: global name.
        global_shape: shape of the whole tensor.
        box: the part that ``value`` fills.
        axes: mesh axes over which the box is replicated.
        value: on the engine's device; shares memory with the state.
    """

    tensor: str
    global_shape: tuple[int, ...]
    box: Box
    axes: Collection[str]
    value: Tensor


class Engine(Protocol):
    """Model, gradients and optimizer of one rank in one generation.

    The mathematics is that of one process on the whole global batch: the loss is the sum of target
    losses over the global count of targets, whatever the layout.
    """

    recipe: Recipe
    job: JobConfig
    layout: Layout
    mesh: DeviceMesh
    model: nn.Module
    step_done: int
    """Steps completed in the state that this engine holds."""

    @property
    def joined(self) -> bool:
        """Whether all replicas hold one state, which can be kept: false only between the outer steps of
        ``communication.sync_every``, and the same on all ranks."""
        ...

    def load(self, state: StateReader) -> None:
        """Take parameters, and optimizer state if there is any, from ``state``, whatever layout wrote it."""
        ...

    def state(self) -> Iterator[Held]:
        """Everything that this rank holds of the training state, always in the same order."""
        ...

    def wanted(self) -> list[tuple[str, Box]]:
        """What :meth:`load` will read."""
        ...

    def pieces(self) -> Iterator[Piece]:
        """The slices that this rank contributes to a checkpoint, on the CPU."""
        ...

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Name and global shape of every tensor that a complete checkpoint holds."""
        ...

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        total_targets: int,
        poll: Callable[[], tuple[int, ...]] = tuple,
        at: Callable[[str, int], None] = lambda phase, micro: None,
    ) -> StepResult:
        """One optimizer step; see :meth:`planaria.engine.native.NativeEngine.train_step`."""
        ...

    def compare_replicas(self) -> Comparison | None:
        """Compare what data-parallel replicas hold of the parameters, bit by bit; collective.

        None on ranks whose group another rank speaks for.
        """
        ...

    def score(self, batch: MicroBatch) -> Tensor:
        """Score of every row of ``batch`` in evaluation mode; collective over the layout like a step's forward."""
        ...


@runtime_checkable
class CountsBytes(Protocol):
    """An engine that counts what it sends."""

    wire: Wire


@runtime_checkable
class HasGradients(Protocol):
    """An engine that shows its gradients while :meth:`Engine.train_step` polls, complete and not yet applied."""

    def gradients(self) -> Iterator[tuple[str, tuple[int, ...], Box, Tensor | None]]:
        """(name, global shape, box, value) of this rank's share of every trainable parameter's gradient.

        None where there is no gradient. The values of one box are equal on all ranks that hold it.
        """
        ...
