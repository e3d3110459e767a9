"""Cross-entropy of logits whose vocabulary is spread over ranks (after Megatron-LM, arXiv:1909.08053).

Three numbers for each token travel instead of V. Shapes: N tokens, V vocabulary, T ranks that share it; rank r
holds logits [N, V/T] of the tokens r*V/T and on.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits_Nv: Tensor, targets_N: Tensor, ignored: int, group: dist.ProcessGroup) -> Tensor:
        v = logits_Nv.shape[1]
        local_N = targets_N - group.rank() * v
        counts_N = targets_N != ignored
        own_N = counts_N & (local_N >= 0) & (local_N < v)
        index_N = local_N.where(own_N, 0)
        peak_N = logits_Nv.amax(dim=1)
        dist.all_reduce(peak_N, dist.ReduceOp.MAX, group)
        shifted_Nv = logits_Nv - peak_N[:, None]
        target_N = shifted_Nv.gather(1, index_N[:, None]).squeeze(1).where(own_N, 0)
        exp_Nv = shifted_Nv.exp_()
        sums_2N = torch.stack([exp_Nv.sum(dim=1), target_N])
        dist.all_reduce(sums_2N, group=group)
        total_N, target_N = sums_2N
        ctx.save_for_backward(exp_Nv.div_(total_N[:, None]), counts_N, own_N, index_N)
        return (total_N.log() - target_N).where(counts_N, 0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        softmax_Nv, counts_N, own_N, index_N = ctx.saved_tensors
        grad_Nv = softmax_Nv * (grad * counts_N)[:, None]
        grad_Nv.scatter_add_(1, index_N[:, None], (-grad * own_N).to(grad_Nv.dtype)[:, None])
        return grad_Nv, None, None, None


def spread_cross_entropy_sum(logits_Nv: Tensor, targets_N: Tensor, ignored: int, group: dist.ProcessGroup) -> Tensor:
    """Sum over the tokens of -log softmax(logits)[target], the same on every rank of ``group``; collective.

    Backward needs no communication: each rank gets the gradient of its own logits.

    Args:
        logits_Nv: this rank's part of the vocabulary, in at least float32.
        targets_N: int64, alike on all ranks; ``ignored`` counts nothing.
    """
    return _CrossEntropy.apply(logits_Nv, targets_N, ignored, group)


def spread_argmax(logits_Nv: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The token with the largest logit, the first of equals, over the whole vocabulary: int64 [N]; collective."""
    own_N, index_N = logits_Nv.max(dim=1)
    peak_N = own_N.clone()
    dist.all_reduce(peak_N, dist.ReduceOp.MAX, group)
    beyond = group.size() * logits_Nv.shape[1]
    first_N = torch.where(own_N == peak_N, index_N + group.rank() * logits_Nv.shape[1], beyond)
    dist.all_reduce(first_N, dist.ReduceOp.MIN, group)
    return first_N
