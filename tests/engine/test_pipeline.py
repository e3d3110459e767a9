"""A model that lies over several pipeline ranks takes the same step as the unmodified model in one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from tests.support.forms import long_form
from tests.support.ranks import RankPool
from tests.support.toy import ToyRecipe
from tests.support.vlm import (
    CPU,
    Held,
    Reference,
    assemble,
    batches,
    engine_of,
    held,
    relative_errors,
    step,
    vlm_job,
)
from torch import Tensor, nn

from planaria.config import JobConfig
from planaria.engine.native import NativeEngine
from planaria.engine.protocol import StepResult
from planaria.layout import Layout, LayoutError
from planaria.models.presets import PRESETS
from planaria.models.vlm import VLMRecipe
from planaria.recipe import StageRules
from planaria.runtime.groups import Groups

LIMIT = 1e-10


def _deep(preset: str, layers: int, schedule: str, virtual: int, **overrides: Any) -> JobConfig:
    """A job whose model has as many decoder layers as the stages of a test need."""
    tree: dict[str, Any] = PRESETS[preset]
    config = tree | {"text_config": tree["text_config"] | {"num_hidden_layers": layers}}
    pipeline = {"layout__pipeline_schedule": schedule, "layout__virtual_stages": virtual}
    return vlm_job(preset, model={"config": config}, **(pipeline | overrides))


@cache
def _reference(preset: str, layers: int) -> tuple[float, dict[str, Tensor]]:
    job = _deep(preset, layers, "1f1b", 1)
    reference = Reference(VLMRecipe(job), job)
    return reference.backward(), reference.gradients()


def _gradients(groups: Groups, job: JobConfig) -> tuple[StepResult, Held]:
    engine = engine_of(groups, VLMRecipe(job), job)
    taken: list[Held] = []
    result = step(engine, on_gradients=lambda: taken.append(held(engine, gradients=True)))
    return result, taken[0]


def _compare(pool: RankPool, layout: Layout, preset: str, layers: int, schedule: str, virtual: int = 1) -> None:
    # Micro-batches of one, so that there are several; some are text alone.
    job = _deep(preset, layers, schedule, virtual, train__micro_batch=1)
    loss, expected = _reference(preset, layers)
    answers = pool.run(layout, _gradients, job)
    errors = relative_errors(assemble(part for _, part in answers), expected)
    worst = max(errors, key=errors.__getitem__)
    print(f"{preset} {layout} {schedule} v{virtual}: {errors[worst]:.1e} ({worst})")
    assert errors[worst] < LIMIT, worst
    norm = sum(gradient.square().sum().item() for gradient in expected.values()) ** 0.5
    for result, _ in answers:
        assert result.loss == pytest.approx(loss, rel=LIMIT)
        assert result.grad_norm == pytest.approx(norm, rel=LIMIT)


TIED, UNTIED = "llava-siglip-qwen-tiny", "llava-tiny"
CHEAP = [
    (Layout(pp=2), UNTIED, 3, "gpipe", 1),
    (Layout(pp=2), TIED, 3, "1f1b", 1),
    (Layout(pp=3), TIED, 4, "1f1b", 1),
    (Layout(pp=2, dp_shard=2), UNTIED, 3, "1f1b", 1),
    (Layout(pp=2, tp=2), TIED, 3, "1f1b", 1),
    (Layout(pp=2), TIED, 4, "interleaved", 2),
    (Layout(pp=2, cp=2), TIED, 4, "interleaved", 2),
    (Layout(pp=2, dp_shard=2), TIED, 3, "zero_bubble", 1),
    (Layout(pp=2), UNTIED, 4, "zero_bubble", 2),
]


@pytest.mark.parametrize(("layout", "preset", "layers", "schedule", "virtual"), CHEAP, ids=str)
def test_gradients_are_those_of_one_process(
    pool: RankPool, layout: Layout, preset: str, layers: int, schedule: str, virtual: int
) -> None:
    _compare(pool, layout, preset, layers, schedule, virtual)


def _scores(groups: Groups, job: JobConfig) -> tuple[list[list[float]], float]:
    engine = engine_of(groups, VLMRecipe(job), job)
    share = batches(engine.recipe, job, 0, 0, 1)
    scores = [engine.score(batch).tolist() for batch in share]
    # Afterwards a step is what it would have been.
    return scores, step(engine).loss


def test_every_rank_of_a_pipeline_knows_the_scores(pool: RankPool) -> None:
    job = _deep(TIED, 4, "interleaved", 2, train__micro_batch=2)
    (expected,) = pool.run(Layout(), _scores, job)
    for scores, loss in pool.run(Layout(pp=2), _scores, job):
        assert scores == expected[0]
        assert loss == pytest.approx(expected[1], rel=LIMIT)


def _stage(groups: Groups, job: JobConfig) -> tuple[int, int, set[str]]:
    engine = NativeEngine(VLMRecipe(job), job, groups.rendezvous.layout, groups.mesh, CPU)
    bytes_ = sum(p.numel() for p in engine.model.parameters())
    return engine.mesh.get_rank(), bytes_, {shard.name for shard in engine.shards if not shard.copy}


def test_a_rank_holds_its_own_stage_alone(pool: RankPool) -> None:
    job = _deep(TIED, 4, "1f1b", 1)
    whole = VLMRecipe(job).build_model()
    answers = sorted(pool.run(Layout(pp=3), _stage, job))
    names = [found for _, _, found in answers]
    assert set.union(*names) == {name for name, _ in whole.named_parameters()}
    assert sum(map(len, names)) == len(set.union(*names))
    tower = {name for name in names[0] if ".vision_tower." in name}
    assert tower and not any(".vision_tower." in name for name in names[1] | names[2])
    total = sum(p.numel() for p in whole.parameters())
    embedding = whole.get_input_embeddings().weight.numel()
    assert sum(count for _, count, _ in answers) == total + embedding


def _refused(groups: Groups, recipe: Any, job: JobConfig) -> str:
    try:
        NativeEngine(recipe, job, groups.rendezvous.layout, groups.mesh, CPU)
    except LayoutError as error:
        return str(error)
    return ""


def test_what_cannot_be_cut_is_refused_by_name(pool: RankPool) -> None:
    job = vlm_job()
    assert all("ToyRecipe does not say" in said for said in pool.run(Layout(pp=2), _refused, ToyRecipe(), job))
    deep = _deep(UNTIED, 3, "interleaved", 2)
    said = pool.run(Layout(pp=2), _refused, VLMRecipe(deep), deep)
    assert all("3 layers cannot be cut into 4 stages" in each for each in said)


class StagedToy(ToyRecipe):
    """The toy, with the two methods by which it can be cut."""

    def stage_rules(self, model: nn.Module) -> StageRules:
        return StageRules(("layers.0", "layers.1"), last=("norm", "head"))

    def resume(self, model: Any, hidden: Tensor, x: Tensor) -> Tensor:
        for layer in model.layers:
            hidden = layer(hidden)
        out: Tensor = model.head(model.norm(hidden)).mean(1)
        return out


def _toy(groups: Groups, job: JobConfig) -> Held:
    engine = engine_of(groups, StagedToy(), job)
    taken: list[Held] = []
    step(engine, on_gradients=lambda: taken.append(held(engine, gradients=True)))
    return taken[0]


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(pp=2, tp=2)], ids=str)
def test_a_module_of_ones_own_can_be_cut(pool: RankPool, layout: Layout) -> None:
    job = vlm_job(layout__pipeline_schedule="zero_bubble")
    reference = Reference(StagedToy(), job)
    reference.backward()
    errors = relative_errors(assemble(pool.run(layout, _toy, job)), reference.gradients())
    assert max(errors.values()) < LIMIT


@pytest.mark.parametrize("freeze", [["vision", "projector"], ["language"]], ids=str)
def test_frozen_parts(pool: RankPool, freeze: list[str]) -> None:
    job = _deep(UNTIED, 3, "zero_bubble", 1, model__freeze=freeze, train__micro_batch=1)
    reference = Reference(VLMRecipe(job), job)
    reference.backward()
    answers = pool.run(Layout(pp=2), _gradients, job)
    errors = relative_errors(assemble(part for _, part in answers), reference.gradients())
    assert max(errors.values()) < LIMIT


def test_recomputation_in_a_split_backward_pass(pool: RankPool) -> None:
    job = _deep(TIED, 3, "zero_bubble", 1, train__micro_batch=1, train__recompute="unit")
    answers = pool.run(Layout(pp=2), _gradients, job)
    errors = relative_errors(assemble(part for _, part in answers), _reference(TIED, 3)[1])
    assert max(errors.values()) < LIMIT


LONG = [
    (Layout(pp=3, dp_shard=2), UNTIED, 4, "1f1b", 1),
    (Layout(pp=2, dp_replicate=2, dp_shard=2), TIED, 3, "zero_bubble", 1),
    (Layout(pp=2, dp_shard=2, tp=2), TIED, 4, "interleaved", 2),
    (Layout(pp=2, dp_shard=2, tp=2), UNTIED, 4, "zero_bubble", 2),
    (Layout(pp=2, dp_replicate=3), TIED, 3, "gpipe", 1),
    (Layout(pp=4, tp=2), TIED, 4, "zero_bubble", 1),
    (Layout(pp=8), UNTIED, 8, "1f1b", 1),
]


@long_form
@pytest.mark.parametrize(("layout", "preset", "layers", "schedule", "virtual"), LONG, ids=str)
def test_gradients_on_larger_layouts(
    pool: RankPool, layout: Layout, preset: str, layers: int, schedule: str, virtual: int
) -> None:
    _compare(pool, layout, preset, layers, schedule, virtual)
