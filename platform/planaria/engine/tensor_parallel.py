"""Tensor and sequence parallelism by leaf name, on unmodified modules.

Linear layers inside a unit are cut in place: column-split weights lose output rows, row-split weights
lose input columns. The collectives sit at the boundary of the module that owns the column-split
leaves (attention, MLP), so the code in between runs as its authors wrote it, only with fewer heads.
Parameters stay plain tensors; :class:`TPCut` records how each local tensor sits in the global one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planaria.engine import collectives as c
from planaria.engine.deep_features import own_features
from planaria.recipe import ShardingRules

SEQUENCE_ARGUMENT = "hidden_states"
OTHER_ARGUMENT = "cross_attention_states"
"""What a module with split projections may take beside its hidden states; whole on every rank."""


class ShardingError(ValueError):
    """A model that the rules cannot cut; the message lists what is not covered and the remedy."""


@dataclass(frozen=True)
class TPCut:
    """How tensor parallelism holds one parameter.

    ``dim``: the global dimension that is split, or None if every rank holds the whole tensor.
    ``partial``: the local gradient is only this rank's share and must be summed over the tp axis.
    """

    dim: int | None = None
    partial: bool = False


class StandIn(nn.Module):
    """In the place of a module that belongs to another pipeline stage: it lets its first argument through.

    It has the plain attributes of that module, which its owner may look at.
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        for key, value in vars(original).items():
            if not key.startswith("_") and not callable(value):
                setattr(self, key, value)
        self.arrived: Tensor | None = None
        """The last input, until somebody takes it away."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        value = args[0] if args else kwargs[SEQUENCE_ARGUMENT]
        self.arrived = value if isinstance(value, Tensor) else None
        return value


def find_module(model: nn.Module, name: str) -> nn.Module | None:
    """Submodule ``name``, or None where another pipeline stage has it."""
    try:
        found = model.get_submodule(name)
    except AttributeError:
        return None
    return None if isinstance(found, StandIn) else found


class RowLinear(nn.Linear):
    """Linear layer that holds some of the input features; partial outputs are summed over ``group``.

    The bias is whole on every rank and added once, after the sum.
    """

    group: dist.ProcessGroup
    sequence: bool = False
    product: Callable[[Tensor, Tensor], Tensor] = staticmethod(nn.functional.linear)

    def forward(self, input: Tensor) -> Tensor:
        partial = self.product(input, self.weight)
        out = (c.scatter_partial_sequence if self.sequence else c.reduce_from_tp)(partial, self.group)
        return out if self.bias is None else out + self.bias


def check_divides(rules: ShardingRules, degree: int) -> None:
    """Raise :class:`ShardingError` if a count that TP splits is not a multiple of ``degree``."""
    wrong = [f"{name}={count}" for name, count in rules.heads.items() if count % degree]
    if wrong:
        raise ShardingError(f"tp={degree} does not divide {', '.join(wrong)}; choose a tp that divides all of them")


def apply_tensor_parallel(
    model: nn.Module, rules: ShardingRules, group: dist.ProcessGroup, sequence_parallel: bool
) -> dict[str, TPCut]:
    """Cut ``model`` in place for this rank of ``group``.

    Args:
        model: unsharded model, on the meta device or with real weights (then its values are sliced).
        rules: which leaves are cut; see :class:`planaria.recipe.ShardingRules`.
        group: the tensor-parallel group.
        sequence_parallel: shard activations along the sequence in the stacks that the rules name.

    Returns:
        The cut of every parameter, by name.

    Raises:
        ShardingError: a matrix inside a unit that no rule covers, or a count that does not divide.
    """
    check_divides(rules, group.size())
    cuts = {name: TPCut() for name, _ in model.named_parameters()}
    sequence_units = _sequence_units(rules) if sequence_parallel else frozenset()
    uncovered: list[str] = []
    for unit_name in rules.units:
        sequence = unit_name in sequence_units
        uncovered += _cut_unit(model.get_submodule(unit_name), unit_name, rules, group, sequence, cuts)
    if uncovered:
        raise ShardingError(
            "no tensor-parallel rule covers " + ", ".join(uncovered) + "; add the leaf name to colwise, rowwise or "
            "replicate in the recipe's sharding(), or train with layout.tp=1"
        )
    if sequence_units:
        firsts, afters = zip(*rules.sequence_parallel, strict=True)
        for collective, names in ((c.split_sequence, firsts), (c.join_sequence, afters)):
            for name in dict.fromkeys(names):
                module = find_module(model, name)
                if module is not None:
                    _hook_input(module, collective, group)
        for name in dict.fromkeys(name.rpartition(".")[0] for name in afters):
            _hook_deep_features(model.get_submodule(name), group)
    return cuts


def _sequence_units(rules: ShardingRules) -> frozenset[str]:
    stacks = {first.rpartition(".")[0] for first, _ in rules.sequence_parallel}
    return frozenset(unit for unit in rules.units if unit.rpartition(".")[0] in stacks)


def _cut_unit(
    unit: nn.Module,
    unit_name: str,
    rules: ShardingRules,
    group: dist.ProcessGroup,
    sequence: bool,
    cuts: dict[str, TPCut],
) -> list[str]:
    """Cut one unit; returns the matrices that no rule covers."""
    uncovered: list[str] = []
    split_parents: set[str] = set()
    joined_parents: set[str] = set()
    adapted: list[str] = []
    for name, module in list(unit.named_modules()):
        parent, _, leaf = name.rpartition(".")
        full = f"{unit_name}.{name}" if name else unit_name
        if not rules.replicate.isdisjoint(name.split(".")) or any(name.startswith(f"{within}.") for within in adapted):
            continue
        if is_adapted(module) and leaf in rules.colwise | rules.rowwise:
            adapted.append(name)
            (split_parents if leaf in rules.colwise else joined_parents).add(parent)
            _cut_adapted(module, full, leaf in rules.colwise, group, sequence, cuts)
        elif type(module) is nn.Linear and leaf in rules.colwise:
            split_parents.add(parent)
            _split_columns(module, full, group, cuts)
        elif type(module) is nn.Linear and leaf in rules.rowwise:
            joined_parents.add(parent)
            unit.get_submodule(parent).register_module(leaf, _split_rows(module, full, group, sequence, cuts))
        else:
            for pname, parameter in module.named_parameters(recurse=False):
                if parameter.dim() > 1:
                    uncovered.append(f"{full}.{pname} {list(parameter.shape)}")
    for parent in sorted(split_parents ^ joined_parents | (split_parents & {""})):
        where = f"{unit_name}.{parent}" if parent else unit_name
        raise ShardingError(
            f"{where} must be a sub-module of a unit that holds both colwise and rowwise layers and no residual "
            "connection (attention, MLP); regroup the layers, or keep them whole with replicate"
        )
    for parent in split_parents:
        owner = unit.get_submodule(parent)
        _hook_input(owner, c.gather_sequence if sequence else c.copy_to_tp, group)
        _hook_other_input(owner, group)
        for attribute in rules.head_attributes:
            count = getattr(owner, attribute, None)
            if isinstance(count, int):
                setattr(owner, attribute, count // group.size())
    _mark_partial(unit, unit_name, split_parents, sequence, cuts)
    for name in adapted:
        if name.rpartition(".")[2] in rules.rowwise:
            # The second factor sees what the first one has summed over the group: like a bias of the layer.
            for key in unit.get_submodule(name).lora_B:  # type: ignore[union-attr]
                cuts[f"{unit_name}.{name}.lora_B.{key}.weight"] = TPCut(partial=sequence)
    return uncovered


def is_adapted(module: nn.Module) -> bool:
    """Whether ``module`` is a linear layer that peft has put low-rank adapters around (Hu et al., arXiv:2106.09685)."""
    return all(hasattr(module, name) for name in ("base_layer", "lora_A", "lora_B"))


def _cut_adapted(
    module: Any, full: str, columns: bool, group: dist.ProcessGroup, sequence: bool, cuts: dict[str, TPCut]
) -> None:
    """Cut ``y = W x + s B A x`` as its ``W`` is cut, exactly.

    Columns: ``B`` loses the same output rows as ``W``; ``A`` is whole, and its gradient partial. Rows: ``A`` loses the
    same inputs as ``W``, and its sum over the group has only as many features as the rank; ``B`` is whole.
    """
    if columns:
        _split_columns(module.base_layer, f"{full}.base_layer", group, cuts)
        for key, second in module.lora_B.items():
            _split_columns(second, f"{full}.lora_B.{key}", group, cuts)
    else:
        module.base_layer = _split_rows(module.base_layer, f"{full}.base_layer", group, sequence, cuts)
        for key, first in list(module.lora_A.items()):
            module.lora_A[key] = _split_rows(first, f"{full}.lora_A.{key}", group, sequence, cuts)


def _split_columns(module: nn.Linear, full: str, group: dist.ProcessGroup, cuts: dict[str, TPCut]) -> None:
    _shrink(module, "weight", 0, group, full, cuts)
    _shrink(module, "bias", 0, group, full, cuts)
    module.out_features //= group.size()


def _split_rows(
    module: nn.Linear, full: str, group: dist.ProcessGroup, sequence: bool, cuts: dict[str, TPCut]
) -> RowLinear:
    _shrink(module, "weight", 1, group, full, cuts)
    module.in_features //= group.size()
    if module.bias is not None:
        cuts[f"{full}.bias"] = TPCut(partial=sequence)
    return _as_row_linear(module, group, sequence)


def _mark_partial(
    unit: nn.Module,
    unit_name: str,
    split_parents: set[str],
    sequence: bool,
    cuts: dict[str, TPCut],
) -> None:
    """Whole parameters whose gradient is partial: those that see only some heads (query/key norms, between
    the split projections) or, under sequence parallelism, only some positions."""
    for name, _ in unit.named_parameters():
        full = f"{unit_name}.{name}"
        owner, _, _ = name.rpartition(".")
        if cuts[full].dim is None and not isinstance(unit.get_submodule(owner), RowLinear):
            among_heads = any(owner == p or owner.startswith(p + ".") for p in split_parents if p)
            cuts[full] = TPCut(partial=sequence or among_heads)


def _shrink(
    module: nn.Module, attribute: str, dim: int, group: dist.ProcessGroup, full: str, cuts: dict[str, TPCut]
) -> None:
    whole = getattr(module, attribute)
    if whole is None:
        return
    if whole.shape[dim] % group.size():
        raise ShardingError(f"tp={group.size()} does not divide dim {dim} of {full}.{attribute} {list(whole.shape)}")
    local = whole.detach().chunk(group.size(), dim=dim)[group.rank()].clone()
    setattr(module, attribute, nn.Parameter(local, requires_grad=whole.requires_grad))
    cuts[f"{full}.{attribute}"] = TPCut(dim=dim)


def _as_row_linear(module: nn.Linear, group: dist.ProcessGroup, sequence: bool) -> RowLinear:
    with torch.device("meta"):
        row = RowLinear(module.in_features, module.out_features, bias=module.bias is not None)
    row.weight, row.bias = module.weight, module.bias
    row.group, row.sequence = group, sequence
    return row


def _hook_input(module: nn.Module, collective: Any, group: dist.ProcessGroup) -> None:
    """Pass the hidden states that enter ``module`` through ``collective``.

    For :data:`collectives.copy_to_tp` and the like, everything in ``module`` must lead through split weights:
    the gradient of a residual inside would be counted once per rank.
    """

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (collective(args[0], group), *args[1:]), kwargs
        if SEQUENCE_ARGUMENT not in kwargs:
            raise ShardingError(
                f"{type(module).__name__} is called without its hidden states; pass them first or as "
                f"{SEQUENCE_ARGUMENT}="
            )
        return args, kwargs | {SEQUENCE_ARGUMENT: collective(kwargs[SEQUENCE_ARGUMENT], group)}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _hook_other_input(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Sum the gradient of :data:`OTHER_ARGUMENT`, of which each rank's heads give a share."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        other = kwargs.get(OTHER_ARGUMENT)
        return args, kwargs if other is None else kwargs | {OTHER_ARGUMENT: c.copy_to_tp(other, group)}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _hook_deep_features(decoder: nn.Module, group: dist.ProcessGroup) -> None:
    """Cut what a decoder adds to its hidden states between layers, as these are cut themselves."""

    def part(whole_BL: Tensor) -> Tensor:
        return whole_BL.chunk(group.size(), dim=1)[group.rank()]

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, own_features(kwargs, part, lambda x_NH: c.copy_to_tp(x_NH, group))

    decoder.register_forward_pre_hook(hook, with_kwargs=True)


def apply_vocabulary_parallel(
    model: nn.Module, head: str, group: dist.ProcessGroup, cuts: dict[str, TPCut], *, gather: bool
) -> bool:
    """Split an untied output head by vocabulary; left whole if tp does not divide it.

    Args:
        gather: whether its logits are gathered; else each rank yields its part.

    Returns:
        Whether the head is split.
    """
    module = model.get_submodule(head)
    assert isinstance(module, nn.Linear)
    if module.out_features % group.size():
        return False
    _shrink(module, "weight", 0, group, head, cuts)
    _shrink(module, "bias", 0, group, head, cuts)
    module.out_features //= group.size()
    _hook_input(module, c.copy_to_tp, group)
    if gather:
        module.register_forward_hook(lambda _module, _args, logits: c.gather_features(logits, group))
    return True
