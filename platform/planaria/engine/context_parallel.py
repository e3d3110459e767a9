"""Context parallelism: each rank of the axis ``cp`` works on its part of a long sequence, on unmodified decoders.

The sequence is split where the first decoder layer takes it, so behind the place where image features are put among
the embeddings, and is not joined again: head and loss work on parts, too. Attention alone needs the whole sequence;
:mod:`planaria.engine.ulysses` gives it the whole of some heads. Vision tower, projector and embeddings run whole on
every rank.

**Gradients.** A rank backpropagates the loss of its own positions. Splitting is a slice, whose gradient is zero
outside; the all-to-alls carry the gradient of every rank's loss to where its operands came from. So what a rank
accumulates in any parameter, be it of decoder, tower or a tied embedding, is its summand of the whole gradient:
the sum over ``cp`` is exact, with no factor anywhere.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from planaria.engine.deep_features import own_features
from planaria.engine.tensor_parallel import SEQUENCE_ARGUMENT, ShardingError, find_module
from planaria.engine.ulysses import Attention, attend
from planaria.recipe import PartialLogitsRecipe, Recipe, ShardingRules

IMPLEMENTATION = "planaria_ulysses"
"""Name of the attention function in transformers' registry."""
ROTARY_ARGUMENT = "position_embeddings"
POSITIONS_ARGUMENT = "position_ids"


class Sequence:
    """The part of the sequence that a rank works on, and whether attention has looked beyond it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.inner = "sdpa"
        """The attention function for whole sequences."""
        self.attended = False

    def part(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part of ``whole`` along ``dim``.

        Raises:
            ValueError: the degree does not divide the length; on all ranks alike, since they hold the same rows.
        """
        length, degree = whole.shape[dim], self.group.size()
        if length % degree:
            raise ValueError(
                f"context parallelism: cp={degree} does not divide the sequence length {length}; pad the sequences in "
                "collate() to a multiple of layout.tp x layout.cp"
            )
        return whole.narrow(dim, self.group.rank() * (length // degree), length // degree)


def check_context_parallel(recipe: Recipe, rules: ShardingRules, tp: int, cp: int) -> None:
    """Raise :class:`ShardingError` if the recipe's model cannot have the degree ``cp`` beside ``tp``."""
    if cp == 1:
        return
    if not isinstance(recipe, PartialLogitsRecipe) or not recipe.partial_logits:
        raise ShardingError(
            f"cp={cp}: the loss of {type(recipe).__name__} needs whole sequences; heed logits_part() in it and set "
            "partial_logits=True, or set layout.cp=1"
        )
    if not rules.sequence_parallel:
        raise ShardingError(
            f"cp={cp}: the model has no decoder whose sequence can be split; name it in sequence_parallel of the "
            "recipe's sharding(), or set layout.cp=1"
        )
    if wrong := [f"{name}={count}" for name, count in rules.sequence_heads.items() if count % (tp * cp)]:
        raise ShardingError(
            f"cp={cp} with tp={tp}: {tp * cp} does not divide {', '.join(wrong)}; choose tp and cp whose product does"
        )


def apply_context_parallel(model: nn.Module, rules: ShardingRules, group: dist.ProcessGroup) -> None:
    """Make ``model`` work on this rank's part of each sequence, in place.

    To be called before tensor parallelism, whose sequence parallelism splits the part once more.

    Args:
        rules: ``sequence_parallel`` names the stacks of units whose sequence is split.

    Raises:
        ShardingError: attention in such a stack does not go through transformers' attention interface.
    """
    _register()
    sequence = Sequence(group)
    firsts, afters = zip(*rules.sequence_parallel, strict=True)
    # Pipeline stages of one rank share a stack, but each has a first layer of its own.
    for first in firsts:
        # Hooks run in the order in which they are registered: this one before sequence parallelism's.
        if (layer := find_module(model, first)) is not None:  # another pipeline rank may have it
            layer.register_forward_pre_hook(functools.partial(_cut_input, sequence), with_kwargs=True)
    for decoder in {after.rpartition(".")[0] for after in afters}:
        hook = functools.partial(_cut_deep_features, sequence)
        model.get_submodule(decoder).register_forward_pre_hook(hook, with_kwargs=True)
    stacks = {first.rpartition(".")[0] for first in firsts}
    for unit in rules.units:
        if unit.rpartition(".")[0] in stacks:
            _cut_unit(model.get_submodule(unit), unit, sequence)


def _cut_unit(layer: nn.Module, name: str, sequence: Sequence) -> None:
    attentions = [module for module in layer.modules() if hasattr(module, "is_causal") and hasattr(module, "config")]
    if not attentions:
        raise ShardingError(
            f"{name} has no attention that goes through transformers' attention interface, which is where context "
            "parallelism enters; set layout.cp=1"
        )
    for module in attentions:
        # The decoder's own config keeps its implementation, after which it makes the mask: of the whole sequence.
        own: Any = copy.copy(module.config)
        sequence.inner = own._attn_implementation
        own._attn_implementation = IMPLEMENTATION
        module.config = own
        module.planaria_sequence = sequence  # type: ignore[assignment]
    layer.register_forward_pre_hook(functools.partial(_cut_positions, sequence), with_kwargs=True)
    layer.register_forward_hook(functools.partial(_check_attended, sequence, name))


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    sequence: Sequence = module.planaria_sequence  # type: ignore[assignment]
    sequence.attended = True
    # Positions are those of this rank's part; nothing that attends to whole sequences may take them for its own.
    options.pop(POSITIONS_ARGUMENT, None)
    return attend(_implementation(sequence.inner), sequence.group, module, query, key, value, mask, **options)


def _register() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attention)


def _implementation(name: str) -> Attention:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if name not in ALL_ATTENTION_FUNCTIONS:  # "eager" is not: each family has its own
        raise ShardingError(f"context parallelism needs sdpa or flash attention, not {name!r}")
    function: Attention = ALL_ATTENTION_FUNCTIONS[name]
    return function


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _cut_input(sequence: Sequence, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    if args:
        return (sequence.part(args[0], 1).contiguous(), *args[1:]), kwargs
    return args, kwargs | {SEQUENCE_ARGUMENT: sequence.part(kwargs[SEQUENCE_ARGUMENT], 1).contiguous()}


def _cut_positions(sequence: Sequence, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Rotary embeddings ([.., L, D] each) and position ids ([.., L]) of this rank's positions. Masks stay whole."""
    sequence.attended = False
    cut: dict[str, Any] = {}
    if (rotary := kwargs.get(ROTARY_ARGUMENT)) is not None:
        cut[ROTARY_ARGUMENT] = tuple(sequence.part(part, -2) for part in rotary)
    if (ids := kwargs.get(POSITIONS_ARGUMENT)) is not None:
        cut[POSITIONS_ARGUMENT] = sequence.part(ids, -1)
    return args, kwargs | cut


def _cut_deep_features(sequence: Sequence, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    return args, own_features(kwargs, lambda whole: sequence.part(whole, 1))


def _check_attended(sequence: Sequence, name: str, *_: Any) -> None:
    """Attention that bypasses the interface would see this rank's part alone: wrong, and silently so."""
    if not sequence.attended:
        raise ShardingError(
            f"the attention of {name} does not go through transformers' attention interface, which is where context "
            "parallelism enters; set layout.cp=1"
        )
