"""A model cut for one rank: TP slices, FSDP2 shards, and where each local tensor sits in the global one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from planaria.engine.initial import tied_names
from planaria.engine.tensor_parallel import ShardingError, TPCut, apply_tensor_parallel, apply_vocabulary_parallel
from planaria.layout import Layout
from planaria.recipe import ShardingRules
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
    precision: str,
    replicas_by_fsdp: bool = True,
    prefetch: bool = True,
) -> list[Shard]:
    """Cut ``model`` in place for this rank.

    The order matters: tensor parallelism first, so that FSDP2 shards the TP slices; units before the
    root, so that each unit is gathered on its own and the root keeps embeddings, norms and heads.

    Args:
        model: unsharded; meta tensors stay meta, real ones are sliced.
        mesh: axes ``dp_replicate``, ``dp_shard``, ``tp`` (see :mod:`planaria.runtime.groups`).
        precision: ``fp32``, ``fp64`` or ``bf16`` (bf16 compute over float32 master weights).
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
    if layout.tp > 1:
        tp = mesh.get_group("tp")
        cuts = apply_tensor_parallel(model, rules, tp, sequence_parallel)
        head = rules.vocabulary_head
        if head is not None and f"{head}.weight" not in tied:
            apply_vocabulary_parallel(model, head, tp, cuts)

    replicated = layout.dp_replicate > 1 and replicas_by_fsdp
    dp_mesh = mesh["dp_replicate", "dp_shard"] if replicated else mesh["dp_shard"]
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
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

    return [_describe(name, p, shapes[name], cuts[name], layout, mesh) for name, p in model.named_parameters()]


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


def fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """Every FSDP2 unit of ``model``, the root included."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield module


def _describe(
    name: str, parameter: nn.Parameter, shape: tuple[int, ...], cut: TPCut, layout: Layout, mesh: DeviceMesh
) -> Shard:
    rank = mesh.get_rank()
    box = held_box(shape, cut.dim, None, layout, rank)
    assert box is not None  # without pipeline stages every rank holds a part of every tensor
    axes = replicated_axes(shape, cut.dim, None)
    stored = is_writer(layout.coords(rank), axes)
    replicas = math.prod(getattr(layout, axis) for axis in axes)
    return Shard(name, parameter, shape, box, cut, axes, stored, replicas)
