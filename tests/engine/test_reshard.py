"""State goes from any layout to any other, and the losses are those of a run that nothing disturbed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tests.support.ranks import RankPool
from tests.support.saving import save
from tests.support.vlm import Held, assemble, engine_of, held, relative_errors, step, vlm_job

from planaria.config import JobConfig
from planaria.layout import Layout
from planaria.models.vlm import VLMRecipe
from planaria.runtime.groups import Groups
from planaria.state.vault import Vault

LIMIT = 1e-10
STEPS = 2
"""Steps per layout."""


def _leg(groups: Groups, job: JobConfig, folder: str, begin: int, steps: int) -> tuple[list[float], Held]:
    """Load the checkpoint of ``begin`` (or start afresh), train, save."""
    engine = engine_of(groups, VLMRecipe(job), job)
    vault = Vault(folder)
    if begin:
        with vault.at(begin) as checkpoint:
            engine.load(checkpoint)
    assert engine.step_done == begin
    losses = [step(engine).loss for _ in range(steps)]
    save(engine, vault, f"from-{begin}")
    return losses, held(engine, gradients=False)


def _journey(pool: RankPool, layouts: list[Layout], job: JobConfig, folder: Path) -> tuple[list[float], dict[str, Any]]:
    losses: list[float] = []
    answers: list[tuple[list[float], Held]] = []
    for layout in layouts:
        answers = pool.run(layout, _leg, job, str(folder), len(losses), STEPS)
        assert all(found == answers[0][0] for found, _ in answers)
        losses += answers[0][0]
    return losses, assemble(part for _, part in answers)


JOURNEYS = {
    "llava-tiny": [
        [Layout(dp_shard=3), Layout(dp_shard=2, tp=2), Layout(tp=2), Layout(dp_shard=4)],
        [Layout(), Layout(dp_replicate=2, tp=2), Layout(dp_shard=3, tp=2), Layout(dp_replicate=3)],
    ],
    "llava-siglip-qwen-tiny": [[Layout(dp_shard=2, tp=2), Layout(dp_replicate=2, dp_shard=2), Layout(tp=2), Layout()]],
}


@pytest.mark.parametrize("preset", JOURNEYS)
def test_losses_on_changing_layouts_are_those_of_one_layout(pool: RankPool, tmp_path: Path, preset: str) -> None:
    job = vlm_job(preset, optim__lr=3e-3, optim__clip_norm=0.5, optim__schedule={"kind": "cosine", "warmup_steps": 2})
    count = len(JOURNEYS[preset][0])
    ((undisturbed, weights),) = pool.run(Layout(), _leg, job, str(tmp_path / "still"), 0, STEPS * count)
    expected = assemble([weights])
    for number, layouts in enumerate(JOURNEYS[preset]):
        losses, found = _journey(pool, layouts, job, tmp_path / str(number))
        assert losses == pytest.approx(undisturbed, rel=LIMIT)
        errors = relative_errors(found, expected)
        worst = max((name for name in errors if not name.endswith("k_proj.bias")), key=errors.__getitem__)
        assert errors[worst] < 1e-8, worst


def test_a_checkpoint_holds_every_tensor_once(pool: RankPool, tmp_path: Path) -> None:
    job = vlm_job()
    model = VLMRecipe(job).build_model()
    pool.run(Layout(dp_replicate=2, dp_shard=1, tp=2), _leg, job, str(tmp_path), 0, 1)
    with Vault(tmp_path).at(1) as checkpoint:
        named = {f"model/{name}": tuple(p.shape) for name, p in model.named_parameters()}
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        named |= {
            f"optim/{key}/{name}": tuple(p.shape)
            for name, p in model.named_parameters()
            if name in trained
            for key in ("exp_avg", "exp_avg_sq")
        }
        named["optim/updates"] = ()
        assert {name: checkpoint.global_shape(name) for name in checkpoint.tensors} == named
        stored = sum(piece.box.numel for name in named for piece in checkpoint.index.tensors[name])
        assert stored == sum(math.prod(shape) for shape in named.values())


PIPED = [Layout(pp=2), Layout(dp_shard=2), Layout(pp=2, tp=2), Layout(pp=3)]


def test_state_goes_into_pipelines_and_out_of_them(pool: RankPool, tmp_path: Path) -> None:
    # Embeddings are tied: both ends of the pipeline hold them, one of them stores them.
    job = vlm_job("llava-siglip-qwen-tiny", optim__lr=3e-3, optim__clip_norm=0.5)
    ((undisturbed, weights),) = pool.run(Layout(), _leg, job, str(tmp_path / "still"), 0, STEPS * len(PIPED))
    losses, found = _journey(pool, PIPED, job, tmp_path / "moved")
    assert losses == pytest.approx(undisturbed, rel=LIMIT)
    errors = relative_errors(found, assemble([weights]))
    worst = max((name for name in errors if not name.endswith("k_proj.bias")), key=errors.__getitem__)
    assert errors[worst] < 1e-8, worst
    with (
        Vault(tmp_path / "moved").at(STEPS * len(PIPED)) as piped,
        Vault(tmp_path / "still").at(STEPS * len(PIPED)) as still,
    ):
        assert set(piped.tensors) == set(still.tensors)
        for name in still.tensors:
            stored = sum(piece.box.numel for piece in piped.index.tensors[name])
            assert stored == math.prod(still.global_shape(name)), name
