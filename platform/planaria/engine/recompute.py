"""Activation checkpointing: what the forward pass does not keep, the backward pass computes again.

A unit keeps its class, its name and its hooks; only the function that it calls is replaced. So global names of
parameters do not change, and the order of things is the one that composition needs: tensor parallelism inside (its
collectives are computed again, by all ranks of the group at the same point), then the checkpoint, then FSDP2, which
gathers a unit's parameters for the backward pass before anything in it is computed again. (Chen et al., "Training Deep
Nets with Sublinear Memory Cost", arXiv:1604.06174; what to save by operator: Korthikanti et al., arXiv:2205.05198.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from planaria.engine.tensor_parallel import ShardingError

CACHES = ("past_key_values", "past_key_value", "layer_past")
"""Arguments by which layers of Hugging Face models fill a cache: twice, if they are computed twice."""

_ATEN = torch.ops.aten
SAVED = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN.bmm.default,
        _ATEN.baddbmm.default,
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
    }
)
"""What selective recomputation keeps: nearly all the arithmetic of a layer, and a part of its memory. The rest (norms,
activations, products by element, dropout) is cheap to compute again."""


def apply_recompute(model: nn.Module, units: Sequence[str], mode: str) -> None:
    """Make every unit of ``model`` compute its activations again in the backward pass.

    After tensor parallelism, before FSDP2. Without gradients (evaluation, a frozen tower before all that trains) a
    unit does what it always did.

    Args:
        units: names of modules.
        mode: ``none``; ``unit``: only what enters a unit is kept; ``selective``: besides, outputs of :data:`SAVED`.

    Raises:
        ShardingError: there are no units.
    """
    if mode == "none":
        return
    if not units:
        raise ShardingError(
            f"train.recompute={mode} goes by the units of the recipe's sharding(), and there are none; name the layers "
            "in ShardingRules.units, or set train.recompute=none"
        )
    context = {"context_fn": partial(create_selective_checkpoint_contexts, _policy)} if mode == "selective" else {}
    for name in units:
        unit = model.get_submodule(name)
        unit.forward = _again(unit, unit.forward, context)


def _again(unit: nn.Module, forward: Callable[..., Any], context: dict[str, Any]) -> Callable[..., Any]:
    @wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not _needs_gradient(unit, args, kwargs):
            return forward(*args, **kwargs)
        kwargs |= {name: None for name in CACHES if name in kwargs}
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=True, **context, **kwargs)

    return checkpointed


def _needs_gradient(unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    entering = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    return any(value.requires_grad for value in entering) or any(p.requires_grad for p in unit.parameters())


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in SAVED else CheckpointPolicy.PREFER_RECOMPUTE
