"""A node dies under DeepSpeed, and the job goes on from the memory of the others; then under the other engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.forms import long_form
from tests.support.runs import Run, expected_ids, job, node_of_worker, train_with

from planaria.runtime.local_cluster import LocalCluster

STEPS = 24


@long_form
@pytest.mark.parametrize("stage", (2, 3))
def test_a_node_kill_costs_no_loss_its_digits(tmp_path: Path, stage: int) -> None:
    train = {"steps": STEPS, "global_batch": 10, "micro_batch": 2}
    engine = {"name": "deepspeed", "zero_stage": stage}
    with LocalCluster(3) as cluster:
        faulty = job(tmp_path / "faulty", train=train, engine=engine, elastic={"min_workers": 1, "max_workers": 3})

        def kill_a_node_at_work() -> None:
            run = Run(tmp_path / "faulty")
            cluster.kill_node(node_of_worker(cluster, run, run.of("generation")[-1]["workers"][1]))

        quiet = job(tmp_path / "quiet", train=train, elastic={"min_workers": 2, "max_workers": 2})
        train_with(quiet, {})
        trainer = train_with(faulty, {12: kill_a_node_at_work})

    assert [row["layout"] for row in trainer.summary["generations"]] == ["dp_shard3", "dp_shard2"]
    broken, undisturbed = Run(tmp_path / "faulty"), Run(tmp_path / "quiet")
    assert broken.losses().keys() == set(range(STEPS))
    for step, loss in undisturbed.losses().items():  # of the native engine
        assert broken.losses()[step] == pytest.approx(loss, rel=1e-5), f"step {step}"
    assert broken.ids() == expected_ids(faulty, 500)
    print([row for row in broken.of("fault")], trainer.summary["generations"])
