"""Captioning and visual question answering: next-token cross-entropy and exact-match scoring."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

IGNORED = -100


def token_loss_sum(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Sum of the cross-entropies of all target tokens; labels [B, L], -100 where nothing is predicted."""
    logits_BLV, labels_BL = _shifted(model, batch)
    return nn.functional.cross_entropy(
        logits_BLV.flatten(0, 1), labels_BL.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def exact_match(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """1.0 per row [B] whose answer greedy decoding would reproduce in full, else 0.0.

    Greedy decoding yields the reference if and only if, fed the reference, the model ranks every next token
    of it first; so one forward pass scores a whole answer.
    """
    logits_BLV, labels_BL = _shifted(model, batch)
    right_BL = (logits_BLV.argmax(-1) == labels_BL) | (labels_BL == IGNORED)
    return right_BL.all(dim=1).double()


def _shifted(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    # Besides ids and mask whatever the model's family takes: pixels, grids, token types, cross-attention masks.
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    out = model(**inputs, use_cache=False)
    logits = out.logits[:, :-1]
    # Cross-entropy in at least float32: bf16 logits lose the differences that the loss is made of.
    return logits.to(torch.promote_types(logits.dtype, torch.float32)), batch["labels"][:, 1:]
