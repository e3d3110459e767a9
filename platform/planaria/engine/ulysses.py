"""All-to-alls around attention that turn sequence shards into head shards and back.

DeepSpeed-Ulysses (arXiv:2309.14509): everything but attention works position by position, so a rank needs only its part
of the sequence; attention works head by head, so there each rank takes the whole sequence of some heads.

Shapes: B batch, N heads, L sequence, D head size, C the context-parallel degree. All work on plain local tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

Attention = Callable[..., tuple[Tensor, Any]]
"""transformers' attention function: (module, q, k, v [B, N, L, D], mask, ...) -> ([B, L, N, D], weights)."""


class _Exchange(Function):
    """Part i of the first dim goes to rank i, whose part for this rank takes its place: its own transpose."""

    @staticmethod
    def forward(ctx: Any, x_C: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out_C = torch.empty_like(x_C, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out_C, x_C.contiguous(), group=group)
        return out_C

    @staticmethod
    def backward(ctx: Any, grad_C: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(grad_C, ctx.group), None


def heads_for_sequence(x_BNlD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, N, L/C, D] of this rank's positions -> [B, N/C, L, D] of its heads. C divides N."""
    B, N, l, D = x_BNlD.shape  # noqa: E741
    C = group.size()
    parts = x_BNlD.reshape(B, C, N // C, l, D).transpose(0, 1)
    arrived_CBnlD = _Exchange.apply(parts, group)
    return arrived_CBnlD.permute(1, 2, 0, 3, 4).reshape(B, N // C, C * l, D)


def sequence_for_heads(x_BLnD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, L, N/C, D] of this rank's heads -> [B, L/C, N, D] of its positions; the inverse, but for the layout."""
    B, L, n, D = x_BLnD.shape
    C = group.size()
    parts = x_BLnD.reshape(B, C, L // C, n, D).transpose(0, 1)
    arrived_CBlnD = _Exchange.apply(parts, group)
    return arrived_CBlnD.permute(1, 2, 0, 3, 4).reshape(B, L // C, C * n, D)


def sharable(key_value: Tensor, degree: int) -> Tensor:
    """[B, N, L/C, D] with each head repeated in place until ``degree`` divides their number.

    Rank r then gets exactly the key/value heads that its query heads attend to, whatever the grouping: repeating
    in place keeps the ratio of query to key/value indices.
    """
    heads = key_value.shape[1]
    times = math.lcm(heads, degree) // heads
    return key_value if times == 1 else key_value.repeat_interleave(times, dim=1)


def attend(
    inner: Attention,
    group: dist.ProcessGroup,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of the whole sequence from parts of it.

    Args:
        inner: attention of whole sequences.
        query: [B, N, L/C, D], rotary embeddings applied; C divides N.
        key, value: [B, K, L/C, D], K a divisor of N.
        mask: for the whole sequence, alike for all heads.

    Returns:
        [B, L/C, N, D], as transformers' attention functions do.
    """
    key, value = sharable(key, group.size()), sharable(value, group.size())
    heads, pairs = query.shape[1], key.shape[1]
    if query.shape[-1] == value.shape[-1]:  # one message instead of three
        merged = torch.cat([part.unflatten(1, (group.size(), -1)) for part in (query, key, value)], dim=2).flatten(1, 2)
        sizes = [heads // group.size(), pairs // group.size(), pairs // group.size()]
        query, key, value = heads_for_sequence(merged, group).split(sizes, dim=1)
    else:
        query, key, value = (heads_for_sequence(part, group) for part in (query, key, value))
    out, _ = inner(_Grouped(module, heads // pairs), query, key, value, mask, **options)
    return sequence_for_heads(out, group), None


class _Grouped:
    """An attention module to whoever asks, but with so many query heads for each key/value head."""

    def __init__(self, module: nn.Module, groups: int) -> None:
        self._module, self.num_key_value_groups = module, groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
