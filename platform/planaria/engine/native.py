"""The native engine: one optimizer step on one layout with FSDP2, tensor and sequence parallelism."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from planaria.config import JobConfig
from planaria.engine.compute_time import compute_clock
from planaria.engine.initial import build, restore_buffers, retie, seed_of, tied_names
from planaria.engine.optimizer import ShardedOptimizer
from planaria.engine.passes import AccumulatedPasses, Passes
from planaria.engine.protocol import UPDATES, Held, StepResult
from planaria.engine.reduce.make import make_sync, replicas_by_fsdp
from planaria.engine.reduce.protocol import Setting
from planaria.engine.replicas import compare
from planaria.engine.sharded import fsdp_modules, shard_model
from planaria.engine.wire import Wire
from planaria.layout import AXES, Layout, LayoutError
from planaria.recipe import GroupedRecipe, MetaRecipe, MicroBatch, Recipe, ScoredRecipe, StateReader, read_into
from planaria.state.boxes import Box
from planaria.state.dedupe import is_writer
from planaria.state.replicas import Comparison
from planaria.state.writer import Piece


class NativeEngine:
    """Model, gradients and optimizer of one rank in one generation.

    The mathematics is that of one process on the whole global batch: the loss is the sum of target
    losses over the global count of targets, whatever the layout.
    """

    def __init__(self, recipe: Recipe, job: JobConfig, layout: Layout, mesh: DeviceMesh, device: torch.device) -> None:
        if layout.pp > 1 or layout.cp > 1:
            raise LayoutError(f"the native engine does not run pp or cp yet (layout {layout})")
        self.recipe, self.job, self.layout, self.mesh, self.device = recipe, job, layout, mesh, device
        self.step_done = 0
        self.model = build(recipe, job)
        ties = tied_names(self.model)
        rules = recipe.sharding(self.model)
        self.shards = shard_model(
            self.model,
            rules,
            layout,
            mesh,
            sequence_parallel=job.layout.sequence_parallel,
            precision=job.train.precision,
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
            shard.parameter = parameters[shard.name]
        lr_scale = recipe.lr_scale if isinstance(recipe, GroupedRecipe) else _same_rate
        self.optimizer = ShardedOptimizer(self.shards, job.optim, job.train.steps, lr_scale)
        self._units, self._unit_names = list(fsdp_modules(self.model)), rules.units
        self._compute = compute_clock(device, job.train.precision)
        self._rank = mesh.get_rank()
        self._at = layout.coords(self._rank)
        self._passes: Passes = AccumulatedPasses(
            recipe,
            self.model,
            self._units,
            layout,
            counts_loss=self._at["tp"] == 0,
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

    # -- state -----------------------------------------------------------------------------------

    def load(self, state: StateReader) -> None:
        """Take parameters, and optimizer state if there is any, from ``state``, whatever layout wrote it."""
        with torch.no_grad():
            read_into(state, ((f"model/{shard.name}", shard.box, shard.local()) for shard in self.shards))
        if state.step > 0:
            updates = int(state.read(UPDATES, Box.whole(())))
            self.optimizer.load(lambda key, shard: state.read(f"optim/{key}/{shard.name}", shard.box), updates)
        self._sync.load(state)
        self.step_done = state.step

    def state(self) -> Iterator[Held]:
        """Everything that this rank holds of the training state, always in the same order."""
        yield Held(UPDATES, (), Box.whole(()), AXES, torch.tensor(self.optimizer.updates))
        for shard in self.shards:
            yield Held(f"model/{shard.name}", shard.global_shape, shard.box, shard.axes, shard.local())
        for key, shard, value in self.optimizer.state():
            yield Held(f"optim/{key}/{shard.name}", shard.global_shape, shard.box, shard.axes, value)
        for item in self._sync.state():
            yield Held(item.tensor, item.global_shape, item.box, item.axes, item.value)

    def wanted(self) -> list[tuple[str, Box]]:
        """What :meth:`load` will read."""
        own = [(held.tensor, held.box) for held in self.state()]
        # After a change of the number of replicas, what others remembered, too.
        return list(dict.fromkeys([*own, *self._sync.wanted()]))

    def pieces(self) -> Iterator[Piece]:
        """The slices that this rank contributes to a checkpoint, on the CPU."""
        coords = self.layout.coords(self._rank)
        for held in self.state():
            if is_writer(coords, held.axes):
                yield Piece(held.tensor, held.global_shape, held.box, held.value.detach().cpu().contiguous())

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Name and global shape of every tensor that a complete checkpoint holds."""
        shapes: dict[str, tuple[int, ...]] = {UPDATES: ()}
        shapes |= {f"model/{shard.name}": shard.global_shape for shard in self.shards}
        for key, shard, _ in self.optimizer.state():
            shapes[f"optim/{key}/{shard.name}"] = shard.global_shape
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
        torch.manual_seed(seed_of(self.job.seed, f"step {self.step_done} dp {self.layout.dp_rank(self._rank)}"))
        batches = [self._to_device(batch) for batch in micro_batches]
        loss_sum = self._passes.run(batches, 1.0 / max(1, total_targets), at)
        at("reduce", 0)
        self._sum_partial_gradients()
        self._sync.reduce()
        squares, counted_loss, votes = self._global_sums(loss_sum, poll())
        norm = math.sqrt(squares) if squares >= 0 else math.nan
        finite = math.isfinite(norm) and math.isfinite(counted_loss)
        lr = 0.0
        at("update", 0)
        if finite:
            limit = self.job.optim.clip_norm
            lr = self.optimizer.step(self.step_done, 1.0 if limit is None else min(1.0, limit / (norm + 1e-6)))
        for shard in self.shards:
            shard.parameter.grad = None
        self.step_done += 1
        self._sync.settle(finite, self.step_done)
        compute_s = self._compute.stop()
        return StepResult(counted_loss / max(1, total_targets), norm, lr, total_targets, not finite, votes, compute_s)

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
        self.model.eval()
        with torch.no_grad():
            scores = self.recipe.score(self.model, self._to_device(batch))
        for module in self._units:  # without a backward pass the root stays gathered, and would outlive a load()
            module.reshard()
        return scores

    def _to_device(self, batch: MicroBatch) -> dict[str, Tensor]:
        # Arrays from the object store are read-only; torch wants writable memory.
        tensors = {key: torch.from_numpy(array.copy()) for key, array in batch.arrays.items()}
        dtype = torch.float64 if self.job.train.precision == "fp64" else None
        return {
            key: t.to(self.device, dtype if t.is_floating_point() else None, non_blocking=True)
            for key, t in tensors.items()
        }

    def _sum_partial_gradients(self) -> None:
        """Add up, in one message, the gradients of whole parameters that saw only part of the work."""
        if self.layout.tp == 1:
            return
        grads = [grad for shard in self.shards if shard.cut.partial and (grad := shard.grad()) is not None]
        if not grads:
            return
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=self.mesh.get_group("tp"))
        offset = 0
        for grad in grads:
            grad.copy_(flat[offset : offset + grad.numel()].view_as(grad))
            offset += grad.numel()

    def _global_sums(self, loss_sum: Tensor, votes: tuple[int, ...]) -> tuple[float, float, tuple[int, ...]]:
        """(squared gradient norm, loss sum, votes) over the whole world, each slice counted once."""
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        by_replicas: dict[int, list[Tensor]] = {}
        for shard in self.shards:
            grad = shard.grad()
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
