"""Adapters on any layout are those of one process, tensor and sequence parallelism included."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.ranks import RankPool
from tests.support.saving import save
from tests.support.vlm import Held, Reference, assemble, engine_of, held, relative_errors, step, vlm_job

from planaria.config import JobConfig
from planaria.layout import Layout
from planaria.models.lora import is_adapter
from planaria.models.vlm import VLMRecipe
from planaria.runtime.groups import Groups
from planaria.state.vault import Vault

STEPS = 3


def _job(*, sequence_parallel: bool = True) -> JobConfig:
    return vlm_job(
        "llava-siglip-qwen-tiny",
        model__lora={"rank": 4},
        model__freeze=["vision"],
        optim__lr=1e-2,
        train__recompute="unit",
        layout__sequence_parallel=sequence_parallel,
    )


def _train(groups: Groups, job: JobConfig, folder: str, begin: int, steps: int) -> tuple[list[float], Held, set[str]]:
    engine = engine_of(groups, VLMRecipe(job), job)
    vault = Vault(folder)
    if begin:
        with vault.at(begin) as checkpoint:
            engine.load(checkpoint)
    losses = [step(engine).loss for _ in range(steps)]
    save(engine, vault, f"from-{begin}")
    return losses, held(engine, gradients=False), {n.split("/", 2)[2] for n in engine.expected() if n.count("/") > 1}


@pytest.fixture(scope="module")
def reference() -> tuple[list[float], Reference]:
    """Peft's layers under plain torch, in this process."""
    found = Reference(VLMRecipe(_job()), _job())
    optimizer = found.optimizer()
    losses = []
    for _ in range(STEPS):
        losses.append(found.backward())
        optimizer.step()
        found.step_done += 1
    return losses, found


@pytest.mark.parametrize(
    ("first", "second", "sequence_parallel"),
    [
        (Layout(dp_shard=2, tp=2), Layout(dp_shard=3), True),
        (Layout(tp=2), Layout(dp_replicate=2, tp=2), False),
    ],
    ids=["sp", "no-sp"],
)
def test_adapters_after_a_change_of_layout_are_those_of_one_process(
    pool: RankPool,
    tmp_path: Path,
    reference: tuple[list[float], Reference],
    first: Layout,
    second: Layout,
    sequence_parallel: bool,
) -> None:
    job = _job(sequence_parallel=sequence_parallel)
    losses, expected = reference
    early = pool.run(first, _train, job, str(tmp_path), 0, 1)
    late = pool.run(second, _train, job, str(tmp_path), 1, STEPS - 1)
    assert [*early[0][0], *late[0][0]] == pytest.approx(losses, rel=1e-10)
    errors = relative_errors(assemble(part for _, part, _ in late), expected.parameters())
    assert max(errors.values()) < 1e-9
    for _, _, with_state in late:
        assert with_state == {name for name in expected.parameters() if is_adapter(name)}, "no moments of the base"
    moved = {name for name, value in expected.parameters().items() if is_adapter(name) and value.any()}
    assert len(moved) == len(expected.gradients())
