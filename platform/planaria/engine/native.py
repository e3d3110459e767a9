"""The native engine: one optimizer step on one layout with FSDP2, tensor and sequence parallelism."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from planaria.config import JobConfig
from planaria.engine.batches import to_device
from planaria.engine.bucketed import sum_in_place
from planaria.engine.compute_time import compute_clock
from planaria.engine.context_parallel import check_context_parallel
from planaria.engine.contrastive_passes import ContrastivePasses
from planaria.engine.initial import build, restore_buffers, retie, seed_of, tied_names
from planaria.engine.loss_scale import LossScale
from planaria.engine.optimizer import ShardedOptimizer
from planaria.engine.passes import AccumulatedPasses, Passes
from planaria.engine.pipeline import PipelinedPasses
from planaria.engine.protocol import GOOD_STEPS, SCALE, UPDATES, Held, StepResult
from planaria.engine.reduce.make import make_sync, replicas_by_fsdp
from planaria.engine.reduce.protocol import Setting
from planaria.engine.replicas import compare
from planaria.engine.sharded import Shard, fsdp_modules, shapes_of, shard_model
from planaria.engine.staged_model import staged_model
from planaria.engine.wire import Wire
from planaria.layout import AXES, Layout, LayoutError
from planaria.recipe import (
    BoundedRecipe,
    ContrastiveRecipe,
    GroupedRecipe,
    MetaRecipe,
    MicroBatch,
    PartialLogitsRecipe,
    Recipe,
    ScoredRecipe,
    StateReader,
    holds,
    read_into,
)
from planaria.state.boxes import Box
from planaria.state.dedupe import is_writer
from planaria.state.replicas import Comparison
from planaria.state.writer import Piece

T = TypeVar("T")


class NativeEngine:
    """Model, gradients and optimizer of one rank in one generation.

    The mathematics is that of one process on the whole global batch: the loss is the sum of target
    losses over the global count of targets, whatever the layout.
    """

    def __init__(self, recipe: Recipe, job: JobConfig, layout: Layout, mesh: DeviceMesh, device: torch.device) -> None:
        self.recipe, self.job, self.layout, self.mesh, self.device = recipe, job, layout, mesh, device
        self.step_done = 0
        self.model = build(recipe, job)
        rules = recipe.sharding(self.model)
        check_context_parallel(recipe, rules, layout.tp, layout.cp)
        self._shapes = shapes_of(self.model)
        self._staged = staged_model(recipe, job, self.model, rules, layout, mesh) if layout.pp > 1 else None
        if self._staged is not None:
            rules = self._staged.cut.sharding
        ties = tied_names(self.model)
        self.shards = shard_model(
            self.model,
            rules,
            layout,
            mesh,
            sequence_parallel=job.layout.sequence_parallel,
            train=job.train,
            partial_logits=isinstance(recipe, PartialLogitsRecipe) and recipe.partial_logits,
            owned=None if self._staged is None else self._staged.cut.owned,
            replicas_by_fsdp=replicas_by_fsdp(job.communication),
            prefetch=job.communication.prefetch,
        )
        if isinstance(recipe, MetaRecipe):
            self.model.to_empty(device=device)
            retie(self.model, ties)
            restore_buffers(recipe, job, self.model)
        else:
            self.model.to(device)
            retie(self.model, ties)
        parameters = dict(self.model.named_parameters())
        for shard in self.shards:  # materialising may have replaced the parameter objects
            shard.parameter = parameters[shard.module_name]
        lr_scale = recipe.lr_scale if isinstance(recipe, GroupedRecipe) else _same_rate
        self.optimizer = ShardedOptimizer(self.shards, job.optim, job.train.steps, lr_scale)
        self._scale = LossScale(job.train.loss_scale.initial) if job.train.precision == "fp16" else None
        self._units, self._unit_names = list(fsdp_modules(self.model)), rules.units
        self._compute = compute_clock(device, job.train.precision)
        self._rank = mesh.get_rank()
        self._at = layout.coords(self._rank)
        bounds = {s.name: recipe.bounds(s.name) for s in self.shards} if isinstance(recipe, BoundedRecipe) else {}
        self._bounded = [(shard, limits) for shard in self.shards if (limits := bounds.get(shard.name)) is not None]
        counts_loss = self._at["tp"] == 0
        self._pipeline: PipelinedPasses | None = None
        self._passes: Passes
        if self._staged is not None:
            schedule, group = job.layout.pipeline_schedule, mesh.get_group("pp")
            self._pipeline = PipelinedPasses(recipe, self._staged, schedule, group, device, counts_loss=counts_loss)
            self._passes = self._pipeline
        elif isinstance(recipe, ContrastiveRecipe):
            if job.communication.sync_every is not None:
                raise LayoutError(
                    "communication.sync_every: a contrastive loss is over the whole global batch, so that no replica "
                    "can train for itself; remove the key"
                )
            self._passes = ContrastivePasses(
                recipe, self.model, self._units, layout, mesh, self.shards, counts_loss=counts_loss
            )
        else:
            self._passes = AccumulatedPasses(
                recipe,
                self.model,
                self._units,
                layout,
                counts_loss=counts_loss,
                accumulate_whole=job.communication.accumulate == "whole",
            )
        self.wire = Wire()
        self._sync = make_sync(
            Setting(
                shards=self.optimizer.shards,
                config=job.communication,
                layout=layout,
                mesh=mesh,
                most_replicas=job.layout.dp_replicate,
                seed=job.seed,
                wire=self.wire,
                moments=lambda: (value for _, _, value in self.optimizer.state()),
            )
        )

    @property
    def joined(self) -> bool:
        """See :attr:`planaria.engine.protocol.Engine.joined`."""
        return self._sync.joined

    @property
    def pipeline_bounds(self) -> tuple[int, ...] | None:
        """Which layers each pipeline stage runs (see :class:`planaria.engine.stages.StageCut`); None without stages."""
        return None if self._staged is None else self._staged.cut.bounds

    # -- state -----------------------------------------------------------------------------------

    def load(self, state: StateReader) -> None:
        """Take parameters, and optimizer state if there is any, from ``state``, whatever layout wrote it."""
        with torch.no_grad():
            read_into(state, ((f"model/{shard.name}", shard.box, shard.local()) for shard in self.shards))
        if state.step > 0:
            updates = int(state.read(UPDATES, Box.whole(())))
            self.optimizer.load(lambda key, shard: state.read(f"optim/{key}/{shard.name}", shard.box), updates)
            # A state of another precision has none: the search for a scale begins anew.
            if self._scale is not None and holds(state, SCALE):
                scale, good = (state.read(name, Box.whole(())) for name in (SCALE, GOOD_STEPS))
                self._scale = LossScale(float(scale), int(good))
        self._sync.load(state)
        self.step_done = state.step

    def state(self) -> Iterator[Held]:
        """Everything that this rank holds of the training state, always in the same order."""
        yield from self._scalars()
        for held, shard in self._tensors():
            if not shard.copy:
                yield held
        for item in self._sync.state():
            yield Held(item.tensor, item.global_shape, item.box, item.axes, item.value)

    def _scalars(self) -> Iterator[Held]:
        yield Held(UPDATES, (), Box.whole(()), AXES, torch.tensor(self.optimizer.updates))
        if self._scale is not None:
            yield Held(SCALE, (), Box.whole(()), AXES, torch.tensor(self._scale.scale, dtype=torch.float64))
            yield Held(GOOD_STEPS, (), Box.whole(()), AXES, torch.tensor(self._scale.good_steps))

    def _tensors(self) -> Iterator[tuple[Held, Shard]]:
        """State and shard of every parameter, copies included."""
        for shard in self.shards:
            yield Held(f"model/{shard.name}", shard.global_shape, shard.box, shard.axes, shard.local()), shard
        for key, shard, value in self.optimizer.state():
            yield Held(f"optim/{key}/{shard.name}", shard.global_shape, shard.box, shard.axes, value), shard

    def wanted(self) -> list[tuple[str, Box]]:
        """What :meth:`load` will read."""
        own = [(held.tensor, held.box) for held in (*self._scalars(), *(held for held, _ in self._tensors()))]
        return own + self._sync.wanted()

    def pieces(self) -> Iterator[Piece]:
        """The slices that this rank contributes to a checkpoint, on the CPU."""
        coords = self.layout.coords(self._rank)
        for held in self.state():
            if is_writer(coords, held.axes):
                yield Piece(held.tensor, held.global_shape, held.box, held.value.detach().cpu().contiguous())

    def gradients(self) -> Iterator[tuple[str, tuple[int, ...], Box, Tensor | None]]:
        """See :meth:`planaria.engine.protocol.HasGradients.gradients`."""
        for shard in self.shards:
            if shard.parameter.requires_grad:
                yield shard.name, shard.global_shape, shard.box, shard.grad()

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Name and global shape of every tensor that a complete checkpoint holds."""
        shapes: dict[str, tuple[int, ...]] = {UPDATES: ()}
        shapes |= {SCALE: (), GOOD_STEPS: ()} if self._scale is not None else {}
        shapes |= {f"model/{name}": shape for name, (shape, _) in self._shapes.items()}
        for key in self.optimizer.keys:
            shapes |= {f"optim/{key}/{name}": shape for name, (shape, trains) in self._shapes.items() if trains}
        return shapes | self._sync.expected()

    # -- one step --------------------------------------------------------------------------------

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        total_targets: int,
        poll: Callable[[], tuple[int, ...]] = tuple,
        at: Callable[[str, int], None] = lambda phase, micro: None,
    ) -> StepResult:
        """One optimizer step.

        Args:
            micro_batches: this data-parallel rank's share; the same number on every rank.
            total_targets: number of targets in the global batch; the loss is divided by it.
            poll: called after the last backward pass, before anything of the state changes; its small integers are
                summed over all ranks in a reduction that is made anyway.
            at: told (phase, micro-batch) as the step gets ahead: ``step``, ``reduce``, ``update``.

        A step whose loss or gradient is not finite changes neither parameters nor moments, and counts as no update;
        the learning rate of later steps is what it would have been, since it follows from the number of the step.
        """
        self._compute.start()
        self.model.train()
        # Dropout masks are alike in a tensor-parallel group, where ranks hold the same activations.
        stage = f" pp {self._at['pp']}" if self._at["pp"] else ""
        torch.manual_seed(seed_of(self.job.seed, f"step {self.step_done} dp {self.layout.dp_rank(self._rank)}{stage}"))
        batches = [self._to_device(batch) for batch in micro_batches]
        # Half precision: gradients are magnified by the scale until the update, which divides by it.
        scale = self._scale.scale if self._scale is not None else 1.0
        loss_sum = self._passes.run(batches, scale / max(1, total_targets), at)
        at("reduce", 0)
        self._sum_partial_gradients()
        self._sync.reduce()
        squares, counted_loss, votes = self._global_sums(loss_sum, poll())
        norm = math.sqrt(squares) / scale if squares >= 0 else math.nan
        finite = math.isfinite(norm) and math.isfinite(counted_loss)
        overflow = self._scale is not None and self._scale.to_blame(
            loss_finite=math.isfinite(counted_loss), gradient_finite=math.isfinite(norm)
        )
        lr = 0.0
        at("update", 0)
        if finite:
            limit = self.job.optim.clip_norm
            clip = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
            # The scale is a power of two: one product clips and scales back as exactly as two.
            lr = self.optimizer.step(self.step_done, clip / scale)
            for shard, (least, most) in self._bounded:
                shard.local().clamp_(least, most)
        if self._scale is not None and (finite or overflow):
            self._scale = self._scale.after(self.job.train.loss_scale, overflow=overflow)
        for shard in self.shards:
            shard.parameter.grad = None
        self.step_done += 1
        self._sync.settle(finite, self.step_done)
        compute_s = self._compute.stop()
        loss, used = counted_loss / max(1, total_targets), scale if self._scale is not None else None
        return StepResult(loss, norm, lr, total_targets, not finite, votes, compute_s, overflow, used)

    def compare_replicas(self) -> Comparison | None:
        """Compare what data-parallel replicas hold of the parameters, bit by bit; collective.

        None on ranks whose group another rank speaks for.
        """
        if not self.joined:  # replicas that train for themselves differ lawfully
            return Comparison((), 0, ()) if self._rank == 0 else None
        return compare(self.shards, self._unit_names, self.layout, self.mesh, self.device)

    def score(self, batch: MicroBatch) -> Tensor:
        """Score of every row of ``batch`` in evaluation mode; collective over the layout like a step's forward."""
        assert isinstance(self.recipe, ScoredRecipe)
        if (pipeline := self._pipeline) is not None:
            recipe = self.recipe
            return self._evaluated(lambda _, tensors: pipeline.score(recipe, tensors), batch)
        return self._evaluated(self.recipe.score, batch)

    def features(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Image and text features [B, D] of ``batch`` in evaluation mode; collective like :meth:`score`."""
        assert isinstance(self.recipe, ContrastiveRecipe)
        return self._evaluated(self.recipe.encode, batch)

    def _evaluated(self, function: Callable[[nn.Module, Mapping[str, Tensor]], T], batch: MicroBatch) -> T:
        self.model.eval()
        with torch.no_grad():
            found = function(self.model, self._to_device(batch))
        for module in self._units:  # without a backward pass the root stays gathered, and would outlive a load()
            module.reshard()
        return found

    def _to_device(self, batch: MicroBatch) -> dict[str, Tensor]:
        return to_device(batch, self.device, torch.float64 if self.job.train.precision == "fp64" else None)

    def _sum_partial_gradients(self) -> None:
        """Add up gradients of whole parameters that saw only part of the work: over ``tp`` those of some heads or
        positions, over ``cp`` all, since each rank has seen its part of every sequence."""
        if self.layout.tp > 1:
            partial = [grad for shard in self.shards if shard.cut.partial and (grad := shard.grad()) is not None]
            sum_in_place(partial, self.mesh.get_group("tp"))
        if self.layout.cp > 1:
            every = [grad for shard in self.shards if (grad := shard.grad()) is not None]
            sum_in_place(every, self.mesh.get_group("cp"))

    def _global_sums(self, loss_sum: Tensor, votes: tuple[int, ...]) -> tuple[float, float, tuple[int, ...]]:
        """(squared gradient norm, loss sum, votes) over the whole world, each slice counted once."""
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        by_replicas: dict[int, list[Tensor]] = {}
        for shard in self.shards:
            grad = None if shard.copy else shard.grad()
            if grad is not None and grad.numel():
                by_replicas.setdefault(shard.replicas, []).append(grad)
        for replicas, grads in by_replicas.items():
            norms = torch._foreach_norm(grads, 2, torch.float64)
            squares += torch.stack(norms).square().sum() / replicas
        sums = torch.cat([torch.stack([squares, loss_sum]), torch.tensor(votes, dtype=squares.dtype).to(self.device)])
        dist.all_reduce(sums)
        total_squares, total_loss, *counted = sums.tolist()
        return total_squares, total_loss, tuple(map(int, counted))


def _same_rate(_: str) -> float:
    return 1.0
