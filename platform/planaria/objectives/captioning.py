"""Captioning and visual question answering: next-token cross-entropy and exact-match scoring."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planaria.objectives.cross_entropy import spread_argmax, spread_cross_entropy_sum
from planaria.recipe import LogitsPart, logits_part

IGNORED = -100


def token_loss_sum(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Sum of the cross-entropies of all target tokens; labels [B, L], -100 where nothing is predicted.

    Where ranks share the sequence, that of this rank's positions; see :func:`planaria.recipe.logits_part`.
    """
    logits_BLV, labels_BL, part = _predictions(model, batch)
    logits, labels = logits_BLV.flatten(0, 1), labels_BL.flatten()
    if part.vocabulary is not None:
        return spread_cross_entropy_sum(logits, labels, IGNORED, part.vocabulary)
    return nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


def exact_match(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """1.0 per row [B] whose answer greedy decoding would reproduce in full, else 0.0.

    Greedy decoding yields the reference if and only if, fed the reference, the model ranks every next token
    of it first; so one forward pass scores a whole answer.
    """
    logits_BLV, labels_BL, part = _predictions(model, batch)
    if part.vocabulary is None:
        ranked_first_BL = logits_BLV.argmax(-1)
    else:
        ranked_first_BL = spread_argmax(logits_BLV.flatten(0, 1), part.vocabulary).view_as(labels_BL)
    right_BL = (ranked_first_BL == labels_BL) | (labels_BL == IGNORED)
    right_B = right_BL.all(dim=1).double()
    if part.sequence is not None:  # a row is right if all its parts are
        dist.all_reduce(right_B, dist.ReduceOp.MIN, part.sequence)
    return right_B


def _predictions(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, LogitsPart]:
    """Logits and what each position should predict: the label of the next one, also where another rank has it."""
    # Besides ids and mask whatever the model's family takes: pixels, grids, token types, cross-attention masks.
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    out = model(**inputs, use_cache=False)
    part = logits_part(model)
    labels_BL = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    if part.sequence is not None:
        labels_BL = labels_BL.chunk(part.sequence.size(), dim=1)[part.sequence.rank()]
    # Cross-entropy in at least float32: bf16 logits lose the differences that the loss is made of.
    return out.logits.to(torch.promote_types(out.logits.dtype, torch.float32)), labels_BL, part
