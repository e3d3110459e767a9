"""Whatever the layout, a step is that of the unmodified model in one process on the whole global batch."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import RankPool
from tests.support.vlm import Held, Reference, assemble, batches, engine_of, held, relative_errors, step, vlm_job
from torch import Tensor

from planaria.config import JobConfig
from planaria.engine.protocol import StepResult
from planaria.layout import Layout
from planaria.models.vlm import VLMRecipe
from planaria.runtime.groups import Groups

LIMIT = 1e-10
PRESETS = ("llava-tiny", "llava-siglip-qwen-tiny")
LAYOUTS = [
    Layout(),
    Layout(dp_shard=2),
    Layout(dp_shard=3),
    Layout(dp_shard=4),
    Layout(dp_replicate=2, dp_shard=2),
    Layout(dp_replicate=3),
    Layout(tp=2),
    Layout(dp_shard=2, tp=2),
    Layout(dp_replicate=2, tp=2),
    Layout(dp_shard=3, tp=2),
    Layout(dp_shard=4, tp=2),
    Layout(cp=2),
    Layout(cp=4),
    Layout(dp_shard=2, cp=2),
    Layout(dp_replicate=2, cp=2, tp=2),
]


@cache
def _reference(preset: str) -> tuple[float, dict[str, Tensor]]:
    reference = Reference(VLMRecipe(vlm_job(preset)), vlm_job(preset))
    loss = reference.backward()
    return loss, reference.gradients()


def _gradients(groups: Groups, job: JobConfig) -> tuple[StepResult, Held]:
    engine = engine_of(groups, VLMRecipe(job), job)
    taken: list[Held] = []
    result = step(engine, on_gradients=lambda: taken.append(held(engine, gradients=True)))
    return result, taken[0]


def _norm(tensors: dict[str, Tensor]) -> float:
    return math.sqrt(sum(t.square().sum().item() for t in tensors.values()))


def _compare_gradients(pool: RankPool, layout: Layout, job: JobConfig) -> None:
    assert job.model is not None and job.model.preset is not None
    loss, expected = _reference(job.model.preset)
    answers = pool.run(layout, _gradients, job)
    found = assemble(part for _, part in answers)
    errors = relative_errors(found, expected)
    worst = max(errors, key=errors.__getitem__)
    print(f"{job.model.preset} {layout} sp={job.layout.sequence_parallel}: {errors[worst]:.1e} ({worst})")
    assert errors[worst] < LIMIT, worst
    for result, _ in answers:
        # They fail independently: loss parity says nothing of gradients.
        assert result.loss == pytest.approx(loss, rel=LIMIT)
        assert result.grad_norm == pytest.approx(_norm(expected), rel=LIMIT)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_are_those_of_one_process(pool: RankPool, layout: Layout, preset: str) -> None:
    _compare_gradients(pool, layout, vlm_job(preset))


@pytest.mark.parametrize("preset", PRESETS)
def test_gradients_without_sequence_parallelism(pool: RankPool, preset: str) -> None:
    _compare_gradients(pool, Layout(dp_shard=2, tp=2), vlm_job(preset, layout__sequence_parallel=False))


@pytest.mark.parametrize("layout", [Layout(dp_shard=3), Layout(dp_replicate=2, dp_shard=2)], ids=str)
def test_gradients_from_one_large_micro_batch(pool: RankPool, layout: Layout) -> None:
    _compare_gradients(pool, layout, vlm_job(train__micro_batch=8))


def test_the_batch_is_the_awkward_one_that_these_tests_need() -> None:
    job = vlm_job()
    recipe = VLMRecipe(job)
    # With four ranks, one runs a micro-batch of text alone beside others with pictures, and one gets a filler.
    shares = [batches(recipe, job, 0, rank, 4) for rank in range(4)]
    pictures = [[bool((b.arrays["input_ids"][: len(b.ids)] == recipe.codec.image_id).any()) for b in s] for s in shares]
    assert [False] in pictures and [True] in pictures, pictures
    assert {len(share) for share in shares} == {1}
    assert job.train.global_batch % 2 and job.train.global_batch % 3 and job.train.global_batch % 4
    assert len(batches(recipe, job, 0, 0, 1)) == 3


def test_only_gradients_that_are_mathematically_zero_need_a_floor() -> None:
    for preset in PRESETS:
        _, gradients = _reference(preset)
        tiny = {name for name, gradient in gradients.items() if gradient.abs().max() < 1e-12}
        # A key bias shifts all scores of a query alike; softmax does not see it. Rotary embeddings undo that.
        keys = {name for name in gradients if ".vision_tower." in name and name.endswith("k_proj.bias")}
        assert tiny == keys


# Steps


def _train(groups: Groups, job: JobConfig, steps: int) -> tuple[list[StepResult], Held]:
    engine = engine_of(groups, VLMRecipe(job), job)
    results = [step(engine) for _ in range(steps)]
    return results, held(engine, gradients=False)


ADAMW: dict[str, Any] = {"optim__lr": 1e-3, "optim__weight_decay": 0.1}
# Adam's first steps barely depend on the scale of a gradient; SGD's do.
SGD: dict[str, Any] = {"optim__name": "sgd", "optim__momentum": 0.9, "optim__lr": 0.05, "optim__weight_decay": 0.1}
CLIPPED: dict[str, Any] = SGD | {"optim__clip_norm": 0.3}


@pytest.mark.parametrize(
    ("layout", "optim"),
    [
        pytest.param(Layout(dp_shard=3), ADAMW, id="dp_shard3-adamw"),
        pytest.param(Layout(dp_shard=3), CLIPPED, id="dp_shard3-clipped"),
        pytest.param(Layout(dp_replicate=2, tp=2), SGD, id="dp_replicate2xtp2-sgd"),
        pytest.param(Layout(dp_replicate=2, tp=2), CLIPPED, id="dp_replicate2xtp2-clipped"),
    ],
)
def test_parameters_after_three_steps_are_those_of_plain_torch(
    pool: RankPool, layout: Layout, optim: dict[str, Any]
) -> None:
    job = vlm_job("llava-siglip-qwen-tiny", **optim)
    reference = Reference(VLMRecipe(job), job)
    plain = reference.optimizer()
    losses, norms = [], []
    for _ in range(3):
        losses.append(reference.backward())
        trained = [p for p in reference.model.parameters() if p.requires_grad]
        norms.append(torch.nn.utils.clip_grad_norm_(trained, job.optim.clip_norm or math.inf).item())
        plain.step()
        reference.step_done += 1
    answers = pool.run(layout, _train, job, 3)
    for results, _ in answers:
        assert [r.loss for r in results] == pytest.approx(losses, rel=LIMIT)
        assert [r.grad_norm for r in results] == pytest.approx(norms, rel=LIMIT)
        assert not any(r.skipped for r in results)
    errors = relative_errors(assemble(part for _, part in answers), reference.parameters())
    # A floor for biases that start at zero and whose gradient is zero: Adam makes rounding errors as large as lr.
    checked = {name: error for name, error in errors.items() if not name.endswith("k_proj.bias")}
    assert max(checked.values()) < 1e-8 if job.optim.name == "adamw" else max(checked.values()) < LIMIT
    if job.optim.clip_norm:
        assert min(norms) > job.optim.clip_norm


def test_bf16_follows_the_fp32_curve(pool: RankPool) -> None:
    """Rounding to 8 bits of mantissa moves each loss by less than 2 % while the loss falls by far more."""
    curves = {}
    for precision in ("fp32", "bf16"):
        job = vlm_job(train__precision=precision, train__global_batch=4, train__micro_batch=2, optim__lr=3e-3)
        (results, _), *_ = pool.run(Layout(dp_shard=2), _train, job, 15)
        curves[precision] = [result.loss for result in results]
    assert curves["bf16"] == pytest.approx(curves["fp32"], rel=0.02)
    assert curves["bf16"] != curves["fp32"]
    assert curves["fp32"][-1] < 0.8 * curves["fp32"][0]


# A gradient that is not finite


def _poisoned(groups: Groups, job: JobConfig, culprit: int) -> tuple[list[StepResult], Held, Held, Held]:
    engine = engine_of(groups, VLMRecipe(job), job)
    results = [step(engine)]

    def state() -> Held:
        own = held(engine, gradients=False)
        return own + [
            (f"{key}/{s.name}", s.global_shape, s.box, value.clone()) for key, s, value in engine.optimizer.state()
        ]

    def poison() -> None:
        if dist.get_rank() == culprit:
            gradient = next(g for s in engine.shards if (g := s.grad()) is not None and g.numel())
            gradient.view(-1)[0] = math.inf

    before = state()
    results.append(step(engine, on_gradients=poison))
    after = state()
    results.append(step(engine))
    return results, before, after, state()


@pytest.mark.parametrize("layout", [Layout(dp_shard=2, tp=2), Layout(dp_replicate=2)], ids=str)
def test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks(pool: RankPool, layout: Layout) -> None:
    for results, before, after, later in pool.run(layout, _poisoned, vlm_job(), 1):
        assert [r.skipped for r in results] == [False, True, False]
        assert not math.isfinite(results[1].grad_norm)
        for (name, _, _, old), (_, _, _, kept) in zip(before, after, strict=True):
            assert old is not None and kept is not None
            assert torch.equal(old, kept), name
        assert any(not torch.equal(a[3], b[3]) for a, b in zip(after, later, strict=True))
