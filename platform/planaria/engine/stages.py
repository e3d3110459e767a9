"""A model cut into pipeline stages by pass-through: what belongs to other stages lets its input through.

Nothing is rewritten or deleted from the structure: names stay, lists of layers keep their length, so that what a model
looks up by index (``layer_types[i]``) stays right. Only the parameters of the own stages are left, and with them what
tensor parallelism, FSDP2, the optimizer and the checkpoint index see.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from planaria.engine.initial import tied_names
from planaria.engine.tensor_parallel import ShardingError, StandIn, find_module
from planaria.planner.stages import Unit, costs, cut
from planaria.recipe import ShardingRules, StageRules


@dataclass(frozen=True)
class Owned:
    """A parameter of this rank's stages under the name that the whole training state knows it by."""

    name: str
    rank: int
    """Position on the axis ``pp`` whose state it is."""
    copy: bool
    """Whether this rank only holds the twin of a parameter that is another rank's state (tied embeddings)."""


@dataclass(frozen=True)
class Twin:
    """A parameter that the first and the last pipeline rank both hold; their gradients are added up."""

    name: str
    """In the training state."""
    first: str
    """In the module of the first rank."""
    last: str
    """In the module of the last rank."""


@dataclass(frozen=True)
class StageCut:
    """How a model lies over the pipeline ranks, and which part of it this rank has."""

    pp: int
    rank: int
    bounds: tuple[int, ...]
    """Stage ``s`` runs the layers ``bounds[s]`` to ``bounds[s + 1] - 1``."""
    rules: StageRules
    sharding: ShardingRules
    """Of what is left on this rank."""
    owned: Mapping[str, Owned]
    """By the parameter's name in the module."""
    twins: tuple[Twin, ...]

    @property
    def stages(self) -> int:
        """Number of stages of the whole model."""
        return len(self.bounds) - 1

    @property
    def own(self) -> range:
        """This rank's stages."""
        return range(self.rank, self.stages, self.pp)


def balanced_bounds(model: nn.Module, rules: StageRules, stages: int) -> tuple[int, ...]:
    """Cuts that balance the measured times of a step, or else its floating-point operations: two per weight and
    position in a forward pass."""
    if rules.seconds:
        measured = {name: forward + backward for name, (forward, backward) in rules.seconds.items()}
        times = [measured.get(name, 0.0) for name in rules.layers]
        return _cut(times, rules, stages, measured.get("first", 0.0), measured.get("last", 0.0))
    units, where = [], []
    for name, parameter in model.named_parameters():
        layer = _layer_of(name, rules)
        place = len(rules.layers) if _below(name, rules.last) else -1 if layer is None else layer
        # Tables of embeddings are looked up, not multiplied; a tied one works as the head.
        owner = model.get_submodule(name.rpartition(".")[0])
        flops = 0.0 if isinstance(owner, nn.Embedding) else 2.0 * parameter.numel() * _positions(name, rules)
        where.append(place)
        units.append(Unit(flops, parameter.requires_grad))
    for group in tied_names(model):
        for name in group[1:]:
            if _below(name, rules.last):
                parameter = model.get_parameter(name)
                where.append(len(rules.layers))
                units.append(Unit(2.0 * parameter.numel() * _positions(name, rules), parameter.requires_grad))
    order = sorted(range(len(units)), key=where.__getitem__)
    sums = dict.fromkeys(range(-1, len(rules.layers) + 1), 0.0)
    for index, cost in zip(order, costs([units[i] for i in order]), strict=True):
        sums[where[index]] += cost
    return _cut([sums[i] for i in range(len(rules.layers))], rules, stages, sums[-1], sums[len(rules.layers)])


def _cut(costs: Sequence[float], rules: StageRules, stages: int, first: float, last: float) -> tuple[int, ...]:
    """:func:`planaria.planner.stages.cut`, with the layers that stay together in one piece."""
    bounds = cut([sum(costs[: rules.together]), *costs[rules.together :]], stages, first, last)
    return (0, *(bound + rules.together - 1 for bound in bounds[1:]))


def cut_model(
    model: nn.Module, sharding: ShardingRules, rules: StageRules, bounds: tuple[int, ...], pp: int, rank: int
) -> StageCut:
    """Leave in ``model`` only what pipeline rank ``rank`` needs.

    Raises:
        ShardingError: the rules do not fit the model, or one tensor is used by stages other than first and last.
    """
    _check(model, sharding, rules)
    stages = len(bounds) - 1
    stage_of = {name: _stage_of(name, rules, bounds) for name, _ in model.named_parameters(remove_duplicate=False)}
    ties = tied_names(model)
    canonical = {alias: group[0] for group in ties for alias in group}
    twins = []
    for group in ties:
        held = {stage_of[name] for name in group}
        if len(held) > 1 and held != {0, stages - 1}:
            raise ShardingError(f"{' and '.join(group)} are one tensor in stages other than the first and the last one")
        if len(held) > 1:
            at = {stage: next(name for name in group if stage_of[name] == stage) for stage in held}
            twins.append(Twin(group[0], at[0], at[stages - 1]))
    here = {name for name, stage in stage_of.items() if stage % pp == rank}
    _hollow(model, "", here)
    owned = {}
    for name, _ in model.named_parameters():
        known = canonical.get(name, name)
        home = stage_of[known] % pp
        owned[name] = Owned(known, home, copy=home != rank)
    left = replace(
        sharding,
        units=tuple(unit for unit in sharding.units if find_module(model, unit) is not None),
        sequence_parallel=_sequence_pairs(sharding, rules, bounds, range(rank, stages, pp)),
        # A tied head stays whole, as the embedding at the other end of the pipeline does.
        vocabulary_head=_head(sharding.vocabulary_head, ties, here),
    )
    return StageCut(pp, rank, bounds, rules, left, owned, tuple(twins))


def stage_layers(model: nn.Module, cut: StageCut, stage: int) -> tuple[dict[str, nn.Module], StandIn | None]:
    """Modules to put in place while ``stage`` runs, by name, and the stand-in that its output arrives at.

    None for the last stage, whose output is the model's.
    """
    begin, end = cut.bounds[stage], cut.bounds[stage + 1]
    last = stage == cut.stages - 1
    layers = [
        model.get_submodule(name) if begin <= index < end else StandIn(model.get_submodule(name))
        for index, name in enumerate(cut.rules.layers)
    ]
    parts: dict[str, nn.Module] = {cut.rules.layers[0].rpartition(".")[0]: nn.ModuleList(layers)}
    if last:
        return parts, None
    parts |= {name: StandIn(model.get_submodule(name)) for name in cut.rules.last}
    exit_ = layers[end]
    assert isinstance(exit_, StandIn)
    return parts, exit_


def swap(model: nn.Module, parts: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Put ``parts`` into ``model`` by name; returns what they took the place of."""
    before = {}
    for name, part in parts.items():
        owner, _, leaf = name.rpartition(".")
        modules = model.get_submodule(owner)._modules
        found = modules[leaf]
        assert found is not None
        before[name] = found
        modules[leaf] = part
    return before


def _check(model: nn.Module, sharding: ShardingRules, rules: StageRules) -> None:
    lists = {name.rpartition(".")[0] for name in rules.layers}
    modules = dict(model.named_modules())
    unknown = [name for name in (*rules.layers, *rules.last) if name not in modules]
    if unknown or not rules.layers:
        raise ShardingError(f"stage rules: the model has no modules {', '.join(unknown) or '(none listed)'}")
    if len(lists) > 1 or not isinstance(modules[next(iter(lists))], nn.ModuleList):
        raise ShardingError("stage rules: layers must be the children of one nn.ModuleList")
    if len(rules.layers) != len(modules[next(iter(lists))]):
        raise ShardingError(f"stage rules: layers must name all children of {next(iter(lists))}")
    if not set(rules.layers) <= set(sharding.units):
        raise ShardingError("stage rules: every layer must be a unit of the sharding rules")


def _hollow(model: nn.Module, name: str, here: set[str]) -> None:
    """Replace, from the top down, what has parameters but none in ``here``."""
    module = model.get_submodule(name)
    for key, _ in list(module.named_parameters(recurse=False)):
        if f"{name}.{key}".lstrip(".") not in here:
            module.register_parameter(key, None)
    for key, child in list(module.named_children()):
        path = f"{name}.{key}".lstrip(".")
        names = [f"{path}.{parameter}" for parameter, _ in child.named_parameters(remove_duplicate=False)]
        if not names or here.issuperset(names):
            continue
        if here.isdisjoint(names):
            module._modules[key] = StandIn(child)
        else:
            _hollow(model, path, here)


def _stage_of(name: str, rules: StageRules, bounds: Sequence[int]) -> int:
    layer = _layer_of(name, rules)
    if layer is not None:
        return next(stage for stage, end in enumerate(bounds[1:]) if layer < end)
    return len(bounds) - 2 if _below(name, rules.last) else 0


def _layer_of(name: str, rules: StageRules) -> int | None:
    return next((index for index, layer in enumerate(rules.layers) if name.startswith(f"{layer}.")), None)


def _below(name: str, owners: Sequence[str]) -> bool:
    return any(f"{name}.".startswith(f"{owner}.") for owner in owners)


def _positions(name: str, rules: StageRules) -> int:
    known = [owner for owner in rules.positions if not owner or f"{name}.".startswith(f"{owner}.")]
    return rules.positions[max(known, key=len)] if known else 1


def _sequence_pairs(
    sharding: ShardingRules, rules: StageRules, bounds: Sequence[int], own: range
) -> tuple[tuple[str, str], ...]:
    """Every stage is a stack of its own: its first layer takes whole sequences, since so does :meth:`resume`."""
    pairs: list[tuple[str, str]] = []
    for first, after in sharding.sequence_parallel:
        if first == rules.layers[0]:
            pairs += [(rules.layers[bounds[stage]], after) for stage in own]
        else:
            pairs.append((first, after))
    return tuple(pairs)


def _head(name: str | None, ties: Sequence[Sequence[str]], here: set[str]) -> str | None:
    if name is None or f"{name}.weight" not in here:
        return None
    return None if any(f"{name}.weight" in group for group in ties) else name


def is_sharded_sequence(sharding: ShardingRules, rules: StageRules) -> bool:
    """Whether activations between stages may be shards of the sequence."""
    return any(first in rules.layers for first, _ in sharding.sequence_parallel)
