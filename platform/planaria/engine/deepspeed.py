"""The DeepSpeed engine: one optimizer step with ZeRO 0 to 3, and the state in the index that all engines share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from planaria.config import JobConfig
from planaria.engine.batches import to_device
from planaria.engine.compute_time import compute_clock
from planaria.engine.initial import build, seed_of
from planaria.engine.optimizer import state_keys
from planaria.engine.protocol import UPDATES, Held, StepResult
from planaria.engine.replicas import compare_tensors
from planaria.engine.schedule import lr_factor
from planaria.engine.sharded import check_model
from planaria.engine.zero.fragments import Fragment
from planaria.engine.zero.frozen import frozen_of
from planaria.engine.zero.library import initialise, join
from planaria.engine.zero.model import LossModule, materialise
from planaria.engine.zero.optimizer import optimizer_of
from planaria.engine.zero.partition import Named, partition_of
from planaria.engine.zero.settings import check, settings
from planaria.layout import AXES, Layout
from planaria.recipe import GroupedRecipe, MicroBatch, Recipe, StateReader, read_into
from planaria.state.boxes import Box
from planaria.state.dedupe import is_writer
from planaria.state.replicas import Comparison
from planaria.state.writer import Piece


class DeepSpeedEngine:
    """Model, gradients and optimizer of one rank in one generation, held by DeepSpeed.

    The mathematics is that of :class:`planaria.engine.native.NativeEngine`: the loss is the sum of target losses over
    the global count of targets; DeepSpeed reduces, shards, gathers and steps.
    """

    joined = True
    """See :attr:`planaria.engine.protocol.Engine.joined`."""

    def __init__(self, recipe: Recipe, job: JobConfig, layout: Layout, mesh: DeviceMesh, device: torch.device) -> None:
        check(recipe, layout)
        self.recipe, self.job, self.layout, self.mesh, self.device = recipe, job, layout, mesh, device
        self.step_done = self.updates = 0
        self._rank, self._stage = mesh.get_rank(), job.engine.zero_stage
        self.model: nn.Module = build(recipe, job)
        rules = recipe.sharding(self.model)
        check_model(self.model, rules)
        # Now: cut by ZeRO-3, a parameter does not know its shape.
        shapes = {name: (tuple(p.shape), p.requires_grad) for name, p in self.model.named_parameters()}
        deepspeed = join(device)
        config = settings(job, layout, sum(math.prod(shape) for shape, trained in shapes.values() if trained))
        materialise(self.model, recipe, job, device, deepspeed, config)
        named = [Named(name, shapes[name][0], parameter) for name, parameter in self.model.named_parameters()]
        trained = [item for item in named if item.parameter.requires_grad]
        lr_scale = recipe.lr_scale if isinstance(recipe, GroupedRecipe) else lambda name: 1.0
        self._optimizer, self._peaks = optimizer_of(
            ((item.name, item.shape, item.parameter) for item in trained),
            job.optim,
            lr_scale,
            fused=job.engine.offload_optimizer is not None,
        )
        self._zero = initialise(deepspeed, LossModule(recipe, self.model), self._optimizer, config)
        self._partition = partition_of(self._zero, self._stage, trained)
        self._frozen = frozen_of(
            [item for item in named if not item.parameter.requires_grad],
            self._stage,
            beside=job.train.precision == "bf16",
            rank=self._rank,
            world=layout.world,
        )
        self._named = named
        self._unit_names = rules.units
        self._compute = compute_clock(device, job.train.precision)
        self._begin_optimizer_state()  # what is wanted is asked for before anything is loaded

    # -- state -----------------------------------------------------------------------------------

    def load(self, state: StateReader) -> None:
        """Take parameters, and optimizer state if there is any, from ``state``, whatever engine wrote it."""
        self.updates = int(state.read(UPDATES, Box.whole(()))) if state.step > 0 else 0
        self._begin_optimizer_state()
        with torch.no_grad():
            read_into(state, self._views("model"))
            if state.step > 0:
                for key in state_keys(self.job.optim):
                    read_into(state, self._views("optim", key))
            for item in self._frozen:
                item.load(state)
            self._partition.publish()
        self.step_done = state.step

    def state(self) -> Iterator[Held]:
        """Everything that this rank holds of the training state, always in the same order."""
        yield Held(UPDATES, (), Box.whole(()), AXES, torch.tensor(self.updates))
        for fragment, buffer in self._buffers("model"):
            for box, value in fragment.views(buffer):
                yield Held(f"model/{fragment.name}", fragment.shape, box, fragment.axes, value)
        for item in self._frozen:
            for box, value in item.fragment.views(item.buffer):
                yield Held(f"model/{item.item.name}", item.item.shape, box, item.fragment.axes, value)
        for key in state_keys(self.job.optim):
            for fragment, buffer in self._buffers("optim", key):
                for box, value in fragment.views(buffer):
                    yield Held(f"optim/{key}/{fragment.name}", fragment.shape, box, fragment.axes, value)

    def gradients(self) -> Iterator[tuple[str, tuple[int, ...], Box, Tensor | None]]:
        """See :meth:`planaria.engine.protocol.HasGradients.gradients`."""
        for fragment in self._partition.fragments:
            flat = self._partition.gradient(fragment.group) * self._undo_average
            for box, value in fragment.views(flat):
                yield fragment.name, fragment.shape, box, value

    def wanted(self) -> list[tuple[str, Box]]:
        """What :meth:`load` will read."""
        held = [(held.tensor, held.box) for held in self.state()]
        return list(dict.fromkeys(held + [part for item in self._frozen for part in item.wanted()]))

    def pieces(self) -> Iterator[Piece]:
        """The slices that this rank contributes to a checkpoint, on the CPU."""
        coords = self.layout.coords(self._rank)
        for held in self.state():
            if is_writer(coords, held.axes):
                yield Piece(held.tensor, held.global_shape, held.box, held.value.detach().cpu().contiguous())

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Name and global shape of every tensor that a complete checkpoint holds."""
        shapes: dict[str, tuple[int, ...]] = {UPDATES: ()}
        shapes |= {f"model/{item.name}": item.shape for item in self._named}
        for key in state_keys(self.job.optim):
            shapes |= {f"optim/{key}/{item.name}": item.shape for item in self._named if item.parameter.requires_grad}
        return shapes

    def _buffers(self, kind: str, key: str = "") -> Iterator[tuple[Fragment, Tensor]]:
        """The fragments of trainable parameters, each with the flat buffer of ``kind`` that it lies in."""
        masters = self._partition.masters
        for fragment in self._partition.fragments:
            if kind == "model":
                yield fragment, masters[fragment.group].detach().view(-1)
            else:
                yield fragment, self._partition.optimizer.state[masters[fragment.group]][key].view(-1)

    def _views(self, kind: str, key: str = "") -> Iterator[tuple[str, Box, Tensor]]:
        path = f"{kind}/{key}/" if key else f"{kind}/"
        for fragment, buffer in self._buffers(kind, key):
            for box, view in fragment.views(buffer):
                yield path + fragment.name, box, view

    def _begin_optimizer_state(self) -> None:
        """State of zeros, as the optimizer would make it at its first step: there from the start, to be filled."""
        for master in self._partition.masters:
            held: dict[str, Tensor] = {key: torch.zeros_like(master.detach()) for key in state_keys(self.job.optim)}
            if self.job.optim.name == "adamw":
                held["step"] = torch.tensor(float(self.updates))
            if held:
                self._partition.optimizer.state[master] = held

    # -- one step --------------------------------------------------------------------------------

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        total_targets: int,
        poll: Callable[[], tuple[int, ...]] = tuple,
        at: Callable[[str, int], None] = lambda phase, micro: None,
    ) -> StepResult:
        """One optimizer step; see :meth:`planaria.engine.native.NativeEngine.train_step`."""
        self._compute.start()
        self._zero.train()
        torch.manual_seed(seed_of(self.job.seed, f"step {self.step_done} dp {self._rank}"))
        scale = 1.0 / max(1, total_targets)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        for index, micro_batch in enumerate(micro_batches):
            at("step", index)
            self._zero.set_gradient_accumulation_boundary(index == len(micro_batches) - 1)
            loss = self._zero(to_device(micro_batch, self.device))
            self._zero.backward(loss * scale, scale_wrt_gas=False)
            loss_sum += loss.detach().double()
        at("reduce", 0)
        squares, counted_loss, votes = self._global_sums(loss_sum, poll())
        norm = math.sqrt(squares) if squares >= 0 else math.nan
        finite = math.isfinite(norm) and math.isfinite(counted_loss)
        at("update", 0)
        lr = self._update(norm) if finite else None
        if not finite:
            self._rest()
        self._partition.after_step()
        self.step_done += 1
        compute_s = self._compute.stop()
        mean = counted_loss / max(1, total_targets)
        return StepResult(mean, norm, lr or 0.0, total_targets, lr is None, votes, compute_s)

    def compare_replicas(self) -> Comparison | None:
        """Compare the parameters that every rank holds whole, bit by bit; collective. ZeRO-3 holds nothing twice."""
        if self._stage == 3 or self.layout.world == 1:
            return Comparison((), 0, ()) if self._rank == 0 else None
        named = ((item.name, item.parameter.detach()) for item in self._named)
        ranks = range(self.layout.world)
        return compare_tensors(named, self._unit_names, ranks, self._rank, None, self.device)

    def score(self, batch: MicroBatch) -> Tensor:
        """Score of every row of ``batch`` in evaluation mode; collective over the layout like a step's forward."""
        self._zero.eval()
        with torch.no_grad():
            return self._zero(to_device(batch, self.device), scoring=True)

    def _update(self, norm: float) -> float | None:
        """Clip, step, and gather what was updated; returns the learning rate, or None if DeepSpeed refused."""
        optim = self.job.optim
        factor = lr_factor(self.step_done, self.job.train.steps, optim.schedule)
        for group, peak in zip(self._partition.optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * factor
        clip = 1.0 if optim.clip_norm is None else min(1.0, optim.clip_norm / (norm + 1e-6))
        self._optimizer.grad_factor = clip * self._undo_average
        self._zero.step()
        if not self._zero.was_step_applied():  # its own norm, in float32, had no room for so large a gradient
            return None
        self.updates += 1
        return optim.lr * factor

    def _rest(self) -> None:
        """Let DeepSpeed go through the motions of a step that changes nothing, so that it drops the gradients."""
        self._optimizer.grad_factor = None
        self._zero.step()

    @property
    def _undo_average(self) -> int:
        return self.layout.world if self._partition.average else 1

    def _global_sums(self, loss_sum: Tensor, votes: tuple[int, ...]) -> tuple[float, float, tuple[int, ...]]:
        """(squared gradient norm, loss sum, votes) over the whole world, each element counted once."""
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        grads = [grad.reshape(-1) for grad in self._partition.gradients() if grad.numel()]
        if grads:
            squares += torch.stack(torch._foreach_norm(grads, 2, torch.float64)).square().sum().to(self.device)
        squares *= self._undo_average**2
        if self._stage == 0:
            squares /= self.layout.world  # every rank holds all of it
        sums = torch.cat([torch.stack([squares, loss_sum]), torch.tensor(votes, dtype=squares.dtype).to(self.device)])
        dist.all_reduce(sums)
        total_squares, total_loss, *counted = sums.tolist()
        return total_squares, total_loss, tuple(map(int, counted))
