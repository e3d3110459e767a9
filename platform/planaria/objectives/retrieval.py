"""Retrieval among held-out pairs: how often the right partner is among the first k of all candidates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from planaria.config import JobConfig
from planaria.data.builder import EvalBatch
from planaria.data.plan import micro_batch_plan
from planaria.engine.row_blocks import RowBlocks
from planaria.layout import Layout
from planaria.objectives.contrastive import Blocks
from planaria.recipe import MicroBatch

DEPTHS = (1, 5, 10)


@runtime_checkable
class FeatureEngine(Protocol):
    """An engine that encodes pairs."""

    layout: Layout
    mesh: DeviceMesh

    def features(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Image and text features [B, D]."""
        ...


@dataclass(frozen=True)
class RetrievalScores:
    """Recall over the held-out pairs. A guess would find the partner among the first k of them in k / ``samples``."""

    samples: int
    """Pairs scored; each one's partner is sought among as many candidates."""
    image_to_text_1: float
    image_to_text_5: float
    image_to_text_10: float
    text_to_image_1: float
    text_to_image_5: float
    text_to_image_10: float


def retrieve(
    engine: FeatureEngine, held_out: Callable[[int, int, int], EvalBatch], size: int, job: JobConfig
) -> RetrievalScores:
    """Score up to ``job.evaluate.samples`` held-out pairs; collective, the same answer on every rank."""
    total = min(job.evaluate.samples, size)
    plan = micro_batch_plan(total, engine.layout.dp, job.train.micro_batch)
    images, texts = [], []
    for start, stop in plan.pieces(engine.layout.dp_rank(dist.get_rank())):
        built = held_out(start, stop, max(1, job.train.micro_batch))
        image_BD, text_BD = engine.features(built.batch)
        scored = set(built.batch.ids)
        rows = [row for row in range(stop - start) if start + row in scored]
        images.append(image_BD[rows])
        texts.append(text_BD[rows])
    counts = recall_counts(torch.cat(images), torch.cat(texts), RowBlocks(engine.mesh, job.contrastive.columns)).cpu()
    if not engine.layout.speaks_for_replica(dist.get_rank()):
        counts.zero_()
    dist.all_reduce(counts)
    samples, *found = counts.tolist()
    return RetrievalScores(int(samples), *(count / max(1.0, samples) for count in found))


def recall_counts(image_ND: Tensor, text_ND: Tensor, blocks: Blocks) -> Tensor:
    """Float64 [7]: own pairs, then how many of them are found among the first 1, 5, 10 texts, and images.

    Candidates as similar as the partner, such as a caption that occurs twice, come before or after it by chance: the
    expected count is what is given, so that an encoder which maps everything to one point is worth a guess, not 1.
    """
    true_N = (image_ND * text_ND).sum(1)
    better = torch.zeros(2, len(image_ND), dtype=torch.float64, device=image_ND.device)
    equal = torch.zeros_like(better)
    for block_MW in blocks(torch.cat([image_ND, text_ND], dim=1)):
        image_MD, text_MD = block_MW.split(image_ND.shape[1], dim=1)
        for side, (own_ND, other_MD) in enumerate(((image_ND, text_MD), (text_ND, image_MD))):
            similar_NM = own_ND @ other_MD.T
            # Sums in another order: the partner itself differs from ``true`` by rounding.
            slack = 16 * torch.finfo(similar_NM.dtype).eps
            better[side] += (similar_NM > true_N[:, None] + slack).sum(1)
            equal[side] += ((similar_NM - true_N[:, None]).abs() <= slack).sum(1)
    # Whoever is not even as similar to itself is not a number, and found nowhere.
    chances = [(((depth - better) / equal.clamp(min=1)).clamp(0, 1) * (equal > 0)).sum(1) for depth in DEPTHS]
    return torch.cat([torch.tensor([len(image_ND)]).to(better), torch.stack(chances, dim=1).flatten()])
