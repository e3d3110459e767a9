"""A model that lies over several pipeline ranks takes the same step as the unmodified model in one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from tests.support.ranks import RankPool
from tests.support.vlm import Held, Reference, assemble, engine_of, held, relative_errors, step, vlm_job
from torch import Tensor

from planaria.config import JobConfig
from planaria.engine.protocol import StepResult
from planaria.layout import Layout
from planaria.models.presets import PRESETS
from planaria.models.vlm import VLMRecipe
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
    (Layout(pp=2, dp_shard=2), TIED, 3, "zero_bubble", 1),
    (Layout(pp=2), UNTIED, 4, "zero_bubble", 2),
]


@pytest.mark.parametrize(("layout", "preset", "layers", "schedule", "virtual"), CHEAP, ids=str)
def test_gradients_are_those_of_one_process(
    pool: RankPool, layout: Layout, preset: str, layers: int, schedule: str, virtual: int
) -> None:
    _compare(pool, layout, preset, layers, schedule, virtual)
