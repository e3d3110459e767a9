"""Replicas that train for themselves between outer steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import RankPool
from tests.support.saving import save
from tests.support.toy import ToyRecipe
from tests.support.vlm import Held, assemble, engine_of, held, relative_errors, step

from planaria.config import ConfigError, JobConfig, parse
from planaria.layout import Layout
from planaria.runtime.groups import Groups
from planaria.state.replicas import Comparison
from planaria.state.vault import Vault

RECIPE = ToyRecipe(width=32, samples=24)
SGD: dict[str, Any] = {"name": "sgd", "lr": 0.1, "momentum": 0.5}
ADAMW: dict[str, Any] = {"name": "adamw", "lr": 3e-3}


def job(optim: dict[str, Any], **communication: Any) -> JobConfig:
    tree: dict[str, Any] = {
        "train": {"steps": 40, "global_batch": 12, "micro_batch": 3, "precision": "fp64"},
        "optim": {"clip_norm": None, "schedule": {"kind": "constant"}} | optim,
        "checkpoint": {"every": 40},
        "communication": communication,
    }
    return parse(tree)


def _train(
    groups: Groups, job: JobConfig, steps: int, folder: str = "", begin: int = 0
) -> tuple[list[float], Held, list[tuple[bool, int, Comparison | None]]]:
    """(losses, parameters, after each step: joined?, bytes sent so far, what the comparison told)."""
    engine = engine_of(groups, RECIPE, job)
    if begin:
        with Vault(folder).at(begin) as checkpoint:
            engine.load(checkpoint)
    losses, seen = [], []
    for _ in range(steps):
        losses.append(step(engine).loss)
        seen.append((engine.joined, engine.wire.sent("dp_replicate"), engine.compare_replicas()))
    if folder and not begin:
        save(engine, Vault(folder), "token")
    return losses, held(engine, gradients=False), seen


@pytest.mark.parametrize("layout", [Layout(dp_replicate=2, dp_shard=2), Layout(dp_replicate=3)], ids=str)
def test_an_outer_step_of_one_after_every_step_is_synchronous_training(pool: RankPool, layout: Layout) -> None:
    plain = pool.run(layout, _train, job(SGD), 5)
    outer = pool.run(layout, _train, job(SGD, sync_every=1, outer_lr=1.0, outer_momentum=0.0), 5)
    assert outer[0][0] == pytest.approx(plain[0][0], rel=1e-11)
    found, expected = (assemble(part for _, part, _ in answers) for answers in (outer, plain))
    assert max(relative_errors(found, expected).values()) < 1e-10


def test_replicas_differ_between_outer_steps_and_nobody_is_alarmed(pool: RankPool) -> None:
    layout = Layout(dp_replicate=2, tp=2)
    answers = pool.run(layout, _train, job(ADAMW, sync_every=4), 8)
    for _, _, seen in answers:
        assert [joined for joined, _, _ in seen] == [False, False, False, True] * 2
        sent = [nbytes for _, nbytes, _ in seen]
        assert sent[:3] == [0, 0, 0] and sent[3] == sent[6] > 0 and sent[7] == 2 * sent[3]
        for joined, _, told in seen:
            assert told is None or (told.ranks != ()) == joined
            assert told is None or not told.differ
    assert sum(told is not None for _, _, seen in answers for *_, told in seen) > 4
    assert all(answers[0][0] == losses for losses, _, _ in answers)
    # Parameters and two moments, once in four steps; plain training sends the gradient in each.
    plain = pool.run(layout, _train, job(ADAMW), 4)
    assert answers[0][2][3][1] == pytest.approx(3 / 4 * plain[0][2][3][1], rel=0.01)
    # In the middle of a round they do differ.
    (_, one, _), _, (_, other, _), _ = pool.run(layout, _train, job(ADAMW, sync_every=4), 3)
    assert any(not torch.equal(a, b) for (*_, a), (*_, b) in zip(one, other, strict=True) if a is not None)


def test_training_with_outer_steps_learns_as_well(pool: RankPool) -> None:
    layout = Layout(dp_replicate=2)
    plain, *_ = pool.run(layout, _train, job(ADAMW), 40)
    outer, *_ = pool.run(layout, _train, job(ADAMW, sync_every=5), 40)
    fall = plain[0][0] - min(plain[0])
    assert min(outer[0]) < plain[0][0] - 0.8 * fall


def test_what_is_kept_after_an_outer_step_goes_on_as_if_nothing_had_been(pool: RankPool, tmp_path: Path) -> None:
    layout, config = Layout(dp_replicate=2, dp_shard=2), job(ADAMW, sync_every=2)
    undisturbed = assemble(part for _, part, _ in pool.run(layout, _train, config, 6))
    pool.run(layout, _train, config, 4, str(tmp_path))
    for other in (layout, Layout(dp_replicate=2), Layout(dp_replicate=2, tp=2)):
        found = assemble(part for _, part, _ in pool.run(other, _train, config, 2, str(tmp_path), 4))
        if other == layout:
            assert all(torch.equal(found[name], value) for name, value in undisturbed.items())
        assert max(relative_errors(found, undisturbed).values()) < 1e-8, other
    with Vault(tmp_path).at(4) as checkpoint:
        assert any(checkpoint.read(name).any() for name in checkpoint.tensors if name.startswith("sync/outer/"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"communication": {"sync_every": 7}}, "train.steps=40 is no multiple of communication.sync_every=7"),
        ({"communication": {"sync_every": 8}, "checkpoint": {"every": 50}}, "checkpoint.every=50"),
        ({"communication": {"sync_every": 4}, "checkpoint": {"every": 8}, "memory": {"every": 6}}, "memory.every=6"),
        ({"communication": {"sync_every": 4, "compression": "int8"}}, "remove one of the two"),
        (
            {"communication": {"compression": "powersgd"}, "layout": {"pp": 2}, "elastic": {"max_workers": 2}},
            "compression=powersgd does not go with layout.pp=2",
        ),
        ({"communication": {"compression": "int8"}, "train": {"precision": "fp16"}}, "take bf16"),
        ({"communication": {"compression": "int8"}, "engine": "deepspeed"}, "set engine.name=native"),
    ],
)
def test_what_would_not_be_exact_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(changes | {"train": {"steps": 40, "global_batch": 4} | changes.get("train", {})})
    good = {"sync_every": 8, "outer_momentum": 0.9}
    parse({"train": {"steps": 40, "global_batch": 4}, "checkpoint": {"every": 16}, "communication": good})
