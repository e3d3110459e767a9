"""Negatives from the whole global batch: whatever the layout, a step is that of one process that sees all pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from tests.support.dual import dual_job
from tests.support.forms import long_form
from tests.support.ranks import RankPool
from tests.support.vlm import CPU, Held, Reference, assemble, batches, engine_of, held, relative_errors, step
from torch import Tensor, nn

from planaria.commands.evaluate import lone_mesh
from planaria.config import JobConfig
from planaria.data.builder import BatchBuilder
from planaria.engine.batches import to_device
from planaria.engine.initial import first_state
from planaria.engine.native import NativeEngine
from planaria.engine.protocol import StepResult
from planaria.engine.row_blocks import RowBlocks
from planaria.layout import Layout
from planaria.models.dual import DualEncoderRecipe
from planaria.objectives.evaluate import evaluate
from planaria.objectives.retrieval import RetrievalScores
from planaria.runtime.groups import Groups

LIMIT = 1e-10
PRESETS = ("clip-tiny", "siglip-tiny")
CASES = [
    # (layout, micro-batch): five pairs, so that ranks have different numbers of them, and fillers.
    (Layout(), 1),
    (Layout(dp_shard=2), 2),
    (Layout(dp_shard=3), 1),
    (Layout(dp_replicate=2, dp_shard=2), 1),
    (Layout(dp_shard=2, tp=2), 2),
]
MORE = [
    (Layout(dp_shard=4), 5),
    (Layout(dp_shard=8), 1),
    (Layout(dp_replicate=3), 2),
    (Layout(dp_replicate=2, tp=2), 1),
    (Layout(tp=2), 2),
    (Layout(dp_shard=3, tp=2), 1),
]


@cache
def _reference(preset: str) -> tuple[float, dict[str, Tensor]]:
    job = dual_job(preset)
    reference = Reference(DualEncoderRecipe(job), job)
    return reference.backward(), reference.gradients()


def _gradients(groups: Groups, job: JobConfig) -> tuple[StepResult, Held]:
    engine = engine_of(groups, DualEncoderRecipe(job), job)
    taken: list[Held] = []
    result = step(engine, on_gradients=lambda: taken.append(held(engine, gradients=True)))
    return result, taken[0]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    ("layout", "micro"), [*CASES, *(pytest.param(*case, marks=long_form) for case in MORE)], ids=str
)
def test_gradients_are_those_of_one_process(pool: RankPool, layout: Layout, micro: int, preset: str) -> None:
    loss, expected = _reference(preset)
    answers = pool.run(layout, _gradients, dual_job(preset, train__micro_batch=micro))
    errors = relative_errors(assemble(part for _, part in answers), expected)
    worst = max(errors, key=errors.__getitem__)
    print(f"{preset} {layout} micro-batch {micro}: {errors[worst]:.1e} ({worst})")
    assert errors[worst] < LIMIT, worst
    for result, _ in answers:
        assert result.loss == pytest.approx(loss, rel=LIMIT)


def test_every_pair_matters_to_every_other() -> None:
    """The reference is not one of negatives within a micro-batch: that has another loss."""
    job = dual_job()
    reference = Reference(DualEncoderRecipe(job), job)
    local = 0.0
    for batch in batches(reference.recipe, job, 0, 0, 1):
        tensors = to_device(batch, torch.device("cpu"))
        tensors["pixel_values"] = tensors["pixel_values"].double()
        local += reference.recipe.loss(reference.model, tensors).item()
    assert abs(local / 5 - _reference("clip-tiny")[0]) > 0.1


def _train(groups: Groups, job: JobConfig, steps: int) -> tuple[list[StepResult], Held]:
    engine = engine_of(groups, DualEncoderRecipe(job), job)
    results = [step(engine) for _ in range(steps)]
    return results, held(engine, gradients=False)


def test_parameters_after_three_steps_are_those_of_plain_torch(pool: RankPool) -> None:
    """The scale starts at its bound and is pushed beyond: it is held there, on every rank alike."""
    optim: dict[str, Any] = {"optim__name": "sgd", "optim__lr": 0.5, "optim__weight_decay": 0.1}
    job = dual_job("siglip-tiny", contrastive__max_scale=9.9, **optim)
    reference = Reference(DualEncoderRecipe(job), job)
    plain = reference.optimizer()
    losses = []
    for _ in range(3):
        losses.append(reference.backward())
        plain.step()
        with torch.no_grad():
            reference.model.get_parameter("logit_scale").clamp_(0, math.log(9.9))
        reference.step_done += 1
    answers = pool.run(Layout(dp_shard=3), _train, job, 3)
    for results, _ in answers:
        assert [r.loss for r in results] == pytest.approx(losses, rel=LIMIT)
    found = assemble(part for _, part in answers)
    assert found["logit_scale"].item() <= math.log(9.9)
    errors = relative_errors(found, reference.parameters())
    assert max(error for name, error in errors.items() if not name.endswith("k_proj.bias")) < LIMIT


# Rows of other ranks


def _rows(groups: Groups, columns: int) -> list[list[float]]:
    rank = groups.rendezvous.rank
    # Rank r has r rows that no other has: r.0, r.1, ...
    own = torch.tensor([[rank + place / 10] for place in range(rank)], dtype=torch.float64).reshape(rank, 1)
    return [block.flatten().tolist() for block in RowBlocks(groups.mesh, columns)(own)]


@pytest.mark.parametrize("columns", [1, 4, 100])
def test_every_row_is_in_one_block_of_bounded_size(pool: RankPool, columns: int) -> None:
    layout = Layout(dp_replicate=2, dp_shard=2)
    answers = pool.run(layout, _rows, columns)
    expected = sorted(rank + place / 10 for rank in range(4) for place in range(rank))
    for blocks in answers:
        assert blocks == answers[0]
        assert sorted(value for block in blocks for value in block) == expected
        assert max(map(len, blocks)) <= max(4, columns)
    assert (len(answers[0]) == 1) == (columns == 100)


# One process


class _Watched(DualEncoderRecipe):
    """Keeps the image features of every call of ``encode``."""

    def encode(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        features = super().encode(model, batch)
        self.__dict__.setdefault("seen", []).append(features[0].detach().clone())
        return features


def test_the_second_pass_drops_out_what_the_first_did() -> None:
    tree: dict[str, Any] = {"model_type": "clip", "projection_dim": 8}
    for part in ("vision_config", "text_config"):
        tree[part] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        tree[part]["attention_dropout"] = 0.5
    tree["vision_config"] |= {"image_size": 32, "patch_size": 16}
    job = dual_job(model={"config": tree})
    recipe = _Watched(job)
    with lone_mesh(CPU) as mesh:
        engine = NativeEngine(recipe, job, Layout(), mesh, CPU)
        engine.load(first_state(recipe, job))
        step(engine)
    first, second, _, again, once_more = recipe.__dict__["seen"]  # the third is the last: it is not run again
    assert torch.equal(first, again) and torch.equal(second, once_more)
    assert not torch.equal(first, second)


def _retrieval(groups: Groups, job: JobConfig) -> RetrievalScores:
    recipe = DualEncoderRecipe(job)
    engine = engine_of(groups, recipe, job)
    held_out = recipe.dataset("val")
    builder = BatchBuilder(held_out, recipe.collate, job.seed, job.train.global_batch, False)
    scores = evaluate(engine, builder.eval_batch, len(held_out), job)
    assert isinstance(scores, RetrievalScores)
    return scores


def test_retrieval_does_not_depend_on_the_layout(pool: RankPool) -> None:
    job = dual_job(evaluate__samples=11)
    (alone,) = pool.run(Layout(), _retrieval, job)
    assert alone.samples == 11 and alone.image_to_text_10 >= 10 / 11 - 0.3
    for scores in pool.run(Layout(dp_shard=3), _retrieval, job):
        assert scores == alone
