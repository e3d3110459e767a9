"""The worked example of a user's own model: the same losses on any layout, and it learns."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.support.ranks import RankPool
from tests.support.vlm import engine_of, step

import planaria
from planaria.config import ConfigError, parse
from planaria.layout import Layout
from planaria.recipe import MetaRecipe, PretrainedRecipe, ScoredRecipe
from planaria.runtime.groups import Groups
from planaria.trainer import ElasticTrainer

EXAMPLE = Path(__file__).parents[2] / "jobs" / "examples" / "own_model.py"


@cache
def _example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("own_model", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["own_model"] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    return module


def _train(groups: Groups, changes: dict[str, Any], steps: int) -> tuple[list[float], float]:
    example = _example()
    job, recipe = parse(example.JOB | changes), example.StripesRecipe()
    engine = engine_of(groups, recipe, job)
    losses = [step(engine).loss for _ in range(steps)]
    samples = [recipe.dataset("val")[index] for index in range(40)]
    return losses, engine.score(recipe.collate(samples, [1] * 40)).mean().item()


def test_losses_are_the_same_on_one_rank_on_three_and_with_tensor_parallelism(pool: RankPool) -> None:
    changes = {"train": {"steps": 9, "global_batch": 8, "micro_batch": 2, "precision": "fp64"}}
    ((expected, score),) = pool.run(Layout(), _train, changes, 3)
    for layout in (Layout(dp_shard=3), Layout(dp_shard=2, tp=2)):
        for losses, other in pool.run(layout, _train, changes, 3):
            assert losses == pytest.approx(expected, rel=1e-10)
            assert other == score


def test_it_learns(pool: RankPool) -> None:
    ((losses, score), *_) = pool.run(Layout(dp_shard=2), _train, {}, 80)
    assert losses[0] == pytest.approx(1.4, abs=0.3)  # ln 4: four answers
    assert losses[-1] < 0.5
    assert score > 0.75


def test_it_is_short_and_implements_the_protocol() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 100
    recipe = _example().StripesRecipe()
    assert isinstance(recipe, ScoredRecipe)
    assert not isinstance(recipe, MetaRecipe) and not isinstance(recipe, PretrainedRecipe)


def test_a_trainer_takes_a_recipe_in_place_of_a_model_section(tmp_path: Path) -> None:
    job = _example().JOB | {"storage": str(tmp_path)}
    trainer = ElasticTrainer(job, recipe=_example().StripesRecipe())
    assert trainer.job.model is None
    assert trainer.preflight().parameters > 10_000
    with pytest.raises(ConfigError, match="model: missing"):
        ElasticTrainer(job)


def test_public_names_are_found() -> None:
    names = set(planaria.__all__) - {"__version__"}
    assert {getattr(planaria, name).__name__ for name in names} == names
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = planaria.nothing
