"""Held-out evaluation, spread over the data-parallel ranks of a layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from planaria.config import JobConfig
from planaria.data.builder import EvalBatch
from planaria.data.plan import micro_batch_plan
from planaria.engine.protocol import Engine
from planaria.objectives.retrieval import FeatureEngine, RetrievalScores, retrieve
from planaria.recipe import ContrastiveRecipe


@dataclass(frozen=True)
class Scores:
    """Scores over the held-out samples."""

    samples: int
    """Samples scored."""
    exact_match: float
    """Share of all samples whose reference is reproduced in full."""
    questions: int
    """Samples whose question admits a known set of answers."""
    accuracy: float
    """Share of these questions answered right."""
    chance: float
    """Expected accuracy of a guess among the answers that each question admits."""


def evaluate(
    engine: Engine, held_out: Callable[[int, int, int], EvalBatch], size: int, job: JobConfig
) -> Scores | RetrievalScores:
    """Score up to ``job.evaluate.samples`` held-out samples; collective, the same answer on every rank.

    Args:
        engine: of a recipe that can be scored (:func:`planaria.recipe.is_scored`).
        held_out: gives indices [start, stop) of the held-out samples in one micro-batch of so many rows.
        size: how many there are.
        job: says how many to score.
    """
    if isinstance(engine, FeatureEngine) and isinstance(engine.recipe, ContrastiveRecipe):
        return retrieve(engine, held_out, size, job)
    total = min(job.evaluate.samples, size)
    plan = micro_batch_plan(total, engine.layout.dp, job.train.micro_batch)
    dp_rank = engine.layout.dp_rank(dist.get_rank())
    counts = torch.zeros(5, dtype=torch.float64)
    for start, stop in plan.pieces(dp_rank):
        built = held_out(start, stop, max(1, job.train.micro_batch))
        scores = engine.score(built.batch).cpu()
        scored = set(built.batch.ids)
        for row, admitted in enumerate(built.choices):
            if start + row in scored:
                right = float(scores[row])
                asked = float(admitted > 0)
                counts += torch.tensor([1.0, right, asked, right * asked, 1.0 / admitted if admitted else 0.0])
    if not engine.layout.speaks_for_replica(dist.get_rank()):
        counts.zero_()
    dist.all_reduce(counts)
    samples, right, questions, answered, chance = counts.tolist()
    return Scores(
        int(samples),
        right / max(1.0, samples),
        int(questions),
        answered / max(1.0, questions),
        chance / max(1.0, questions),
    )
