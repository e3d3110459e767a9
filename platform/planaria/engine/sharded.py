"""A model cut for one rank: TP slices, FSDP2 shards, and where each local tensor sits in the global one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from planaria.config import TrainConfig
from planaria.engine.context_parallel import apply_context_parallel
from planaria.engine.initial import tied_names
from planaria.engine.precision import mixed_precision
from planaria.engine.recompute import apply_recompute
from planaria.engine.stages import Owned
from planaria.engine.tensor_parallel import ShardingError, TPCut, apply_tensor_parallel, apply_vocabulary_parallel
from planaria.layout import Layout
from planaria.recipe import LogitsPart, ShardingRules
from planaria.state.boxes import Box
from planaria.state.dedupe import is_writer
from planaria.state.holdings import held_box, replicated_axes


@dataclass
class Shard:
    """One parameter as this rank holds it."""

    name: str
    parameter: nn.Parameter
    global_shape: tuple[int, ...]
    box: Box
    """Which part of the global tensor the local shard is."""
    cut: TPCut
    axes: frozenset[str]
    """Mesh axes over which the box is replicated: ranks that differ only on these hold this very box."""
    stored: bool
    """Whether this rank writes the box to checkpoints (exactly one rank per box does)."""
    replicas: int
    """How many ranks hold this very box."""
    copy: bool = False
    """Whether another pipeline stage's twin of this parameter (tied embeddings) is the one that the state knows."""
    module_name: str = ""
    """Name of the parameter in this rank's module."""

    def local(self) -> Tensor:
        """The local shard, sharing storage with the parameter."""
        return _local(self.parameter)

    def grad(self) -> Tensor | None:
        """The local shard of the gradient, or None."""
        grad = self.parameter.grad
        return None if grad is None else _local(grad)


def _local(tensor: Tensor) -> Tensor:
    # Not to_local(): that goes through autograd, and every shard is asked for several times a step.
    return tensor._local_tensor.detach() if isinstance(tensor, DTensor) else tensor.detach()


def shard_model(
    model: nn.Module,
    rules: ShardingRules,
    layout: Layout,
    mesh: DeviceMesh,
    *,
    sequence_parallel: bool,
    train: TrainConfig,
    partial_logits: bool = False,
    owned: Mapping[str, Owned] | None = None,
    replicas_by_fsdp: bool = True,
    prefetch: bool = True,
) -> list[Shard]:
    """Cut ``model`` in place for this rank.

    The order matters: tensor parallelism first, so that FSDP2 shards the TP slices; recomputation between them, so
    that FSDP2 has gathered what is computed again; units before the root, so that each unit is gathered on its own
    and the root keeps embeddings, norms and heads.

    Args:
        model: unsharded; meta tensors stay meta, real ones are sliced.
        mesh: axes of :func:`planaria.runtime.groups.mesh_axes`.
        train: precision and recomputation.
        partial_logits: whether the loss works on parts of the vocabulary; else the logits are gathered.
        owned: whose state each parameter is, where the model is only this rank's pipeline stages.
        replicas_by_fsdp: whether FSDP2 adds up the gradients of the replicas; else they are only reduce-scattered.
        prefetch: whether each unit's parameters are gathered while the one before computes forward; backward FSDP2
            does so by itself.

    Raises:
        ShardingError: the model or its rules cannot be cut; on every layout alike where it is not about TP.
    """
    check_model(model, rules)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    tied = {name for group in tied_names(model) for name in group}
    cuts = {name: TPCut() for name in shapes}
    context = mesh.get_group("cp") if layout.cp > 1 else None
    vocabulary = None
    if context is not None:
        apply_context_parallel(model, rules, context)
    if layout.tp > 1:
        tp = mesh.get_group("tp")
        cuts = apply_tensor_parallel(model, rules, tp, sequence_parallel)
        head = rules.vocabulary_head
        if head is not None and f"{head}.weight" not in tied:
            split = apply_vocabulary_parallel(model, head, tp, cuts, gather=not partial_logits)
            vocabulary = tp if split and partial_logits else None
    if partial_logits:
        model.planaria_logits_part = LogitsPart(context, vocabulary)  # type: ignore[assignment]

    apply_recompute(model, rules.units, train.recompute)

    replicated = layout.dp_replicate > 1 and replicas_by_fsdp
    dp_mesh = mesh["dp_replicate", "dp_shard"] if replicated else mesh["dp_shard"]
    policy = mixed_precision(train)
    for unit in rules.units:
        fully_shard(model.get_submodule(unit), mesh=dp_mesh, mp_policy=policy)
    fully_shard(model, mesh=dp_mesh, mp_policy=policy, reshard_after_forward=False)
    for module in fsdp_modules(model):
        # The loss is already divided by the global count of targets: gradients are summed, not averaged.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        # A parameter that no sample of this rank reached (a missing modality) still takes part in the reduction.
        module.set_reduce_scatter_unused_params(True, recurse=False)
    if prefetch and layout.dp_shard > 1:
        prefetch_forward(model, rules.units)

    return [
        _describe(name, p, shapes[name], cuts[name], layout, mesh, None if owned is None else owned[name])
        for name, p in model.named_parameters()
    ]


def prefetch_forward(model: nn.Module, units: Sequence[str]) -> None:
    """Let each unit gather the next one of its stack (``layers.0``, ``layers.1``, ...) before it computes.

    Across stacks nothing is gathered ahead: whether the next stack runs may depend on the batch.
    """
    known = set(units)
    for unit in units:
        stack, _, place = unit.rpartition(".")
        following = f"{stack}.{int(place) + 1}" if place.isdecimal() else ""
        if following in known:
            module, after = model.get_submodule(unit), model.get_submodule(following)
            assert isinstance(module, FSDPModule) and isinstance(after, FSDPModule)
            module.set_modules_to_forward_prefetch([after])


def check_model(model: nn.Module, rules: ShardingRules) -> None:
    """Raise :class:`ShardingError` for what no layout can cut, or could not without changing the mathematics."""
    modules = dict(model.named_modules())
    owner = {name: next((unit for unit in rules.units if f"{name}.".startswith(f"{unit}.")), "") for name in modules}
    if unknown := [unit for unit in rules.units if unit not in modules or not unit]:
        raise ShardingError(f"sharding rules: the model has no modules {', '.join(unknown)}; correct units")
    if nested := [
        unit
        for unit in rules.units
        if rules.units.count(unit) > 1 or any(unit.startswith(f"{other}.") for other in rules.units)
    ]:
        raise ShardingError(f"sharding rules: units {', '.join(nested)} lie inside other units; list each layer once")
    for names in tied_names(model):
        if len({owner[name.rpartition(".")[0]] for name in names}) > 1:
            raise ShardingError(f"{' and '.join(names)} are one tensor in different units; leave one unit out")
    if scalars := [name for name, parameter in model.named_parameters() if parameter.dim() == 0]:
        raise ShardingError(f"parameters {', '.join(scalars)} have no dimension to shard; give them the shape (1,)")
    running = [
        name
        for name, module in modules.items()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None
    ]
    if running:
        raise ShardingError(
            f"{', '.join(running)}: batch statistics depend on how a batch is cut, so results would change with the "
            "layout; use LayerNorm or GroupNorm"
        )


def shapes_of(model: nn.Module) -> dict[str, tuple[tuple[int, ...], bool]]:
    """(shape, whether it trains) of every parameter of an unsharded model, by name."""
    return {name: (tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()}


def fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """Every FSDP2 unit of ``model``, the root included."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield module


def _describe(
    name: str,
    parameter: nn.Parameter,
    shape: tuple[int, ...],
    cut: TPCut,
    layout: Layout,
    mesh: DeviceMesh,
    owned: Owned | None,
) -> Shard:
    rank = mesh.get_rank()
    at = layout.coords(rank)
    # A copy lies as its twin does, only on another stage.
    stage = None if owned is None else at["pp"]
    box = held_box(shape, cut.dim, stage, layout, rank)
    assert box is not None  # it is the model of this rank's stage
    axes = replicated_axes(shape, cut.dim, stage)
    copy = owned is not None and owned.copy
    stored = is_writer(at, axes) and not copy
    replicas = math.prod(getattr(layout, axis) for axis in axes)
    known = name if owned is None else owned.name
    return Shard(known, parameter, shape, box, cut, axes, stored, replicas, copy, name)
