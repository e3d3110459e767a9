"""The conjugate pairs of collectives that tensor and sequence parallelism insert into autograd.

Each function names what happens forward and backward (after Megatron-LM's f/g operators,
arXiv:1909.08053, and sequence parallelism, arXiv:2205.05198). Shapes: B batch, L sequence, H hidden,
T the tensor-parallel degree. All work on plain local tensors of any floating dtype.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.contiguous().clone()
    dist.all_reduce(out, group=group)
    return out


def _all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    stacked = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    dist.all_gather_single(stacked, x.contiguous(), group=group)
    return stacked if dim == 0 else torch.cat(stacked.chunk(group.size()), dim=dim)


def _reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    # Laying the parts out along dim 0 lets one reduce_scatter serve every dim.
    parts = x.chunk(group.size(), dim=dim)
    stacked = torch.cat(parts, dim=0)
    out = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
    dist.reduce_scatter_single(out, stacked, group=group)
    return out


def _own_part(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return x.chunk(group.size(), dim=dim)[group.rank()].contiguous()


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad, ctx.group), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup, reduce_grad: bool) -> Tensor:
        ctx.dim, ctx.group, ctx.reduce_grad = dim, group, reduce_grad
        return _all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cut = _reduce_scatter if ctx.reduce_grad else _own_part
        return cut(grad, ctx.dim, ctx.group), None, None, None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup, reduce: bool) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return (_reduce_scatter if reduce else _own_part)(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_gather(grad, ctx.dim, ctx.group), None, None, None


def copy_to_tp(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Identity forward, all-reduce backward: a replicated input enters column-split weights."""
    return _Copy.apply(x, group)


def reduce_from_tp(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce forward, identity backward: partial sums leave row-split weights."""
    return _Reduce.apply(x, group)


def gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, L/T, H] -> [B, L, H]; backward reduce-scatters: sequence shards enter column-split weights."""
    return _Gather.apply(x, 1, group, True)


def scatter_partial_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, L, H] partial sums -> [B, L/T, H] (reduce-scatter); backward all-gathers."""
    return _Scatter.apply(x, 1, group, True)


def split_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, L, H] replicated -> own [B, L/T, H]; backward all-gathers: entry of a stack of units.

    Raises:
        ValueError: T does not divide L; on all ranks of the group alike, since they hold the same rows.
    """
    if x.shape[1] % group.size():
        raise ValueError(
            f"sequence parallelism: tp={group.size()} does not divide the sequence length {x.shape[1]}; pad the "
            "sequences in collate() to a multiple of layout.tp, or set layout.sequence_parallel=false"
        )
    return _Scatter.apply(x, 1, group, False)


def join_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, L/T, H] -> [B, L, H] replicated; backward keeps the own slice: exit of a stack of units."""
    return _Gather.apply(x, 1, group, False)


def gather_features(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[..., V/T] -> [..., V]; backward keeps the own slice: a column-split output head."""
    return _Gather.apply(x, x.dim() - 1, group, False)
