"""Contrastive losses over the pairs of a global batch, and their gradients with respect to features.

Every rank forms only the logits of its own rows and columns, a block of other ranks' features at a time, and gets the
exact gradient of the *whole* loss with respect to its own features: nothing has to be sent back. Shapes: N own pairs,
M pairs of a block, D features; l the logits, l_ij = exp(scale) I_i . T_j + bias.

Both losses are a sum over all pairs (i, j) less the logits of the true pairs, which a rank has by itself:

* softmax (InfoNCE, arXiv:1807.03748, as in CLIP): sum_i (logsumexp_j l_ij + logsumexp_j l_ji) / 2 - sum_i l_ii
* sigmoid (SigLIP, arXiv:2303.15343): sum_ij softplus(l_ij) - sum_i l_ii, as softplus(-l) = softplus(l) - l
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from planaria.recipe import Contrast

Blocks = Callable[[Tensor], Iterator[Tensor]]
"""From own rows [N, W] to the rows of all ranks, block by block [M, W]; each row occurs in exactly one block."""


@dataclass(frozen=True)
class FeatureLoss:
    """This rank's share of the loss sum, and its gradients; ``scale`` and ``bias`` are shares, too: they add up."""

    loss: Tensor
    """Float64 scalar."""
    image_ND: Tensor
    text_ND: Tensor
    scale: Tensor
    """Gradient with respect to the logarithm of the scale."""
    bias: Tensor


def own_rows_loss(
    kind: str, image_ND: Tensor, text_ND: Tensor, log_scale: Tensor, bias: Tensor, blocks: Blocks
) -> FeatureLoss:
    """Loss and gradients of this rank's pairs against all pairs; collective if ``blocks`` is.

    Args:
        kind: ``softmax`` or ``sigmoid``, see :class:`planaria.recipe.Contrast`.
        image_ND: own features of unit length; N may be 0.
        text_ND: row i belongs to row i of the images.
        log_scale: logarithm of the scale, a scalar of the features' dtype.
        bias: added to every logit.
        blocks: the features of all ranks.
    """
    with torch.no_grad():
        function = _softmax if kind == "softmax" else _sigmoid
        return function(image_ND, text_ND, log_scale.exp(), bias, blocks)


def _softmax(image_ND: Tensor, text_ND: Tensor, scale: Tensor, bias: Tensor, blocks: Blocks) -> FeatureLoss:
    dim = image_ND.shape[1]
    images_N = image_ND.new_full((len(image_ND),), -torch.inf)  # log of the sum over all texts, of each own image
    texts_N = images_N.clone()
    for block_MW in blocks(torch.cat([image_ND, text_ND], dim=1)):
        image_MD, text_MD = block_MW.split(dim, dim=1)
        images_N = torch.logaddexp(images_N, (scale * image_ND @ text_MD.T).logsumexp(1))
        texts_N = torch.logaddexp(texts_N, (scale * text_ND @ image_MD.T).logsumexp(1))
    to_image_ND, to_text_ND = torch.zeros_like(image_ND), torch.zeros_like(text_ND)
    # The other half of the loss holds own features, too: its sums are those of their owners.
    for block_MW in blocks(torch.cat([image_ND, text_ND, images_N[:, None], texts_N[:, None]], dim=1)):
        image_MD, text_MD, images_M1, texts_M1 = block_MW.split([dim, dim, 1, 1], dim=1)
        for own, own_N, sums_N, other, other_sums_M1 in (
            (to_image_ND, image_ND, images_N, text_MD, texts_M1),
            (to_text_ND, text_ND, texts_N, image_MD, images_M1),
        ):
            logits_NM = scale * own_N @ other.T
            weights_NM = (logits_NM - sums_N[:, None]).exp_()
            weights_NM += logits_NM.sub_(other_sums_M1.T).exp_()
            own.addmm_(weights_NM, other, alpha=0.5)
    return _finished(
        image_ND, text_ND, to_image_ND, to_text_ND, scale, bias, (images_N + texts_N).double().sum() / 2, None
    )


def _sigmoid(image_ND: Tensor, text_ND: Tensor, scale: Tensor, bias: Tensor, blocks: Blocks) -> FeatureLoss:
    to_image_ND, to_text_ND = torch.zeros_like(image_ND), torch.zeros_like(text_ND)
    total = image_ND.new_zeros((), dtype=torch.float64)
    of_bias = torch.zeros_like(total)
    for block_MW in blocks(torch.cat([image_ND, text_ND], dim=1)):
        image_MD, text_MD = block_MW.split(image_ND.shape[1], dim=1)
        logits_NM = scale * image_ND @ text_MD.T + bias
        # softplus(l), which torch's own function rounds to l above a threshold.
        total -= logsigmoid(-logits_NM).sum(dtype=torch.float64)
        weights_NM = logits_NM.sigmoid_()
        of_bias += weights_NM.sum(dtype=torch.float64)
        to_image_ND.addmm_(weights_NM, text_MD)
        to_text_ND.addmm_((scale * text_ND @ image_MD.T + bias).sigmoid_(), image_MD)
    return _finished(image_ND, text_ND, to_image_ND, to_text_ND, scale, bias, total, of_bias)


def _finished(
    image_ND: Tensor,
    text_ND: Tensor,
    to_image_ND: Tensor,
    to_text_ND: Tensor,
    scale: Tensor,
    bias: Tensor,
    total: Tensor,
    of_bias: Tensor | None,
) -> FeatureLoss:
    """Take the true pairs away; the gradients so far lack the factor ``scale``."""
    to_image_ND = (to_image_ND - text_ND) * scale
    to_text_ND = (to_text_ND - image_ND) * scale
    true = (scale * (image_ND * text_ND).sum(1) + (0 if of_bias is None else bias)).double().sum()
    return FeatureLoss(
        loss=total - true,
        image_ND=to_image_ND,
        text_ND=to_text_ND,
        # Own rows against all columns: over all ranks every logit counts once.
        scale=(to_image_ND * image_ND).sum(),
        bias=torch.zeros_like(scale) if of_bias is None else (of_bias - len(image_ND)).to(scale.dtype),
    )


def whole_batch_loss(
    contrast: Contrast, image_BD: Tensor, text_BD: Tensor, log_scale: Tensor, bias: Tensor | None
) -> Tensor:
    """Sum of the losses of B pairs, none of them elsewhere, with a graph: the definition, by [B, B] logits."""
    logits_BB = log_scale.exp() * image_BD @ text_BD.T
    if contrast.kind == "softmax":
        true_B = torch.arange(len(logits_BB), device=logits_BB.device)
        both = (torch.nn.functional.cross_entropy(l_BB, true_B, reduction="sum") for l_BB in (logits_BB, logits_BB.T))
        return sum(both, logits_BB.new_zeros(())) / 2
    assert bias is not None
    sign_BB = 2 * torch.eye(len(logits_BB), device=logits_BB.device, dtype=logits_BB.dtype) - 1
    return -torch.nn.functional.logsigmoid(sign_BB * (logits_BB + bias)).sum()
