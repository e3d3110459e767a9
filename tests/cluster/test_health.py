"""Jobs that train, but wrongly: they stand still, or their numbers are none."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.forms import long_form
from tests.support.runs import ENDLESS, Run, expected_ids, job, train_with
from tests.support.sick import PoisonedRecipe, SlowRecipe, StuckRecipe

from planaria.data.order import indices
from planaria.data.skips import batch_of
from planaria.runtime.local_cluster import LocalCluster
from planaria.trainer import ElasticTrainer, TrainingFailed

pytestmark = pytest.mark.timeout(240)
POINTS = 100
MANY, STEPS = 400, 70
"""So many that the controller has judged the bad ones before the job ends: a step takes some milliseconds."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(2) as found:
        yield found


def toy_job(folder: Path, **sections: Any) -> Any:
    """A job for a recipe of the test's own."""
    merged = {"train": {"steps": 40, "global_batch": 5, "micro_batch": 3}, "elastic": {"max_workers": 2}} | sections
    return job(folder, model=None, data={"shuffle": False}, **merged)


def test_a_worker_that_stands_still_is_found_and_replaced(cluster: LocalCluster, tmp_path: Path) -> None:
    assert cluster.nodes
    flag = tmp_path / "flag"
    config = toy_job(tmp_path, elastic={"max_workers": 2, "hang_s": 8.0}, checkpoint={"every": 1000})
    train_with(config, {10: flag.touch}, recipe=StuckRecipe(flag=str(flag)))
    run = Run(tmp_path)
    (hang,) = run.of("hang")
    stacks = Path(hang["text"].rpartition(": ")[2]).read_text()
    assert "stand_still" in stacks, "the stacks name the line that stands still"
    assert stacks.count("==== worker-") == 2
    (taken,) = tmp_path.glob("flag-*")
    stuck = next(e["member"] for e in run.of("joined") if e["pid"] == int(taken.name.rpartition("-")[2]))
    assert stuck in [event["member"] for event in run.of("lost")]
    after = run.of("generation")[1]
    assert stuck not in after["workers"]
    assert len(set(run.of("generation")[0]["workers"]) & set(after["workers"])) == 1, "the other one lives on"
    assert after["source"] == "memory"
    assert run.ids() == expected_ids(config, POINTS)


def test_data_that_make_no_numbers_are_left_out_after_going_back(cluster: LocalCluster, tmp_path: Path) -> None:
    assert cluster.nodes
    # Batches 12 to 14 of 5 samples each, in the order of the data.
    recipe = PoisonedRecipe(samples=MANY, first=60, stop=75)
    config = toy_job(
        tmp_path,
        train={"steps": STEPS, "global_batch": 5, "micro_batch": 3},
        elastic={"max_workers": 2, "bad_steps": 3},
        checkpoint={"every": 5, "keep_last": 20},  # steps are so fast that the one before the bad ones might go
    )
    ElasticTrainer(config, recipe=recipe).fit()
    run = Run(tmp_path)
    assert [event["step"] for event in run.of("skipped")][:3] == [12, 13, 14]
    (back,) = run.of("rewind")
    # The checkpoint of step 10 may be on its way still when the third bad step is seen.
    assert back["to_step"] in (5, 10) and back["windows"] == [[12, 14]]
    assert run.of("generation")[1]["step"] == back["to_step"]
    last = {row["step"]: row for row in run.metrics}
    assert sorted(last) == list(range(STEPS))
    assert not any(row["skipped"] for row in last.values()), "the poison was left out"
    expected = {}
    for step in range(STEPS):
        at = batch_of(step, [(12, 14)]) * 5
        expected[step] = sorted(indices(at, at + 5, MANY, config.seed, False))
    assert run.ids() == expected


def test_numbers_that_stay_wrong_after_going_back_end_the_job(cluster: LocalCluster, tmp_path: Path) -> None:
    assert cluster.nodes
    config = toy_job(tmp_path, elastic={"max_workers": 2, "bad_steps": 2}, checkpoint={"every": 5})
    with pytest.raises(TrainingFailed, match="not the data, but that state"):
        ElasticTrainer(config, recipe=PoisonedRecipe(first=30, stop=POINTS)).fit()
    assert len(Run(tmp_path).of("rewind")) == 1


@long_form
def test_a_standby_takes_the_place_of_a_worker_that_was_killed(cluster: LocalCluster, tmp_path: Path) -> None:
    assert cluster.nodes
    config = job(
        tmp_path,
        train={"steps": ENDLESS, "global_batch": 6, "micro_batch": 2},
        elastic={"max_workers": 2, "standbys": 1},
        checkpoint={"every": 1000, "at_end": False},
    )
    killed: list[str] = []

    def until(run: Run) -> bool:
        standbys = {event["member"] for event in run.of("joined") if event["member"].startswith("standby-")}
        if len(standbys) == 2 and not killed and run.trains_in(1):
            killed.append("worker-1")
            os.kill(run.pids("worker-1"), signal.SIGKILL)
        return run.trains_in(2)

    trainer = train_with(config, {}, until=until)
    run = Run(tmp_path)
    first, second = run.of("generation")[:2]
    promoted = run.of("promoted")[0]["member"]
    assert second["workers"] == ["worker-0", promoted]
    assert (second["layout"], second["source"]) == (first["layout"], "memory")
    assert run.ids() == expected_ids(config, 500, trainer.summary["steps"])


@long_form
def test_a_spare_takes_over_the_rank_of_a_straggler_and_no_step_is_lost(cluster: LocalCluster, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    # Three workers for batches of two samples: one is a spare.
    config = toy_job(
        tmp_path,
        train={"steps": ENDLESS, "global_batch": 2, "micro_batch": 1},
        elastic={"max_workers": 3, "replace_stragglers": True},
        checkpoint={"every": 1000},
    )
    third, recipe = cluster.add_node(), SlowRecipe(flag=str(flag))
    try:
        trainer = train_with(config, {10: flag.touch}, until=lambda run: run.trains_in(2), recipe=recipe)
    finally:
        cluster.kill_node(third)
    run = Run(tmp_path)
    (taken,) = tmp_path.glob("flag-*")
    slow = next(e["member"] for e in run.of("joined") if e["pid"] == int(taken.name.rpartition("-")[2]))
    (replaced,) = run.of("replacing")
    first, second = run.of("generation")
    assert replaced["member"] == slow
    assert first["spares"] == [replaced["by"]]
    assert second["spares"] == [slow]
    assert (second["cause"], second["source"]) == ("straggler", "memory")
    assert not run.of("rollback")
    assert [row["step"] for row in run.metrics] == list(range(trainer.summary["steps"]))
    assert run.ids() == expected_ids(config, POINTS, trainer.summary["steps"])
