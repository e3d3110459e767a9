"""A node dies under a pipeline, and the job goes on with fewer replicas, or without stages, from memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.forms import long_form
from tests.support.runs import Run, expected_ids, job, node_of_worker, train_with

from planaria.runtime.local_cluster import LocalCluster

STEPS = 36


@long_form
def test_node_kills_cost_no_loss_its_digits(tmp_path: Path) -> None:
    train = {"steps": STEPS, "global_batch": 10, "micro_batch": 2}
    with LocalCluster(3) as cluster:
        faulty = job(tmp_path / "faulty", train=train, layout={"pp": 2}, elastic={"min_workers": 1, "max_workers": 3})

        def kill_a_node_at_work() -> None:
            run = Run(tmp_path / "faulty")
            cluster.kill_node(node_of_worker(cluster, run, run.of("generation")[-1]["workers"][-1]))

        quiet = job(tmp_path / "quiet", train=train, elastic={"min_workers": 2, "max_workers": 2})
        train_with(quiet, {})
        # The last stage's rank goes: a spare takes its place; then there is one worker left, and no pipeline.
        trainer = train_with(faulty, {12: kill_a_node_at_work, 24: kill_a_node_at_work})

    assert [row["layout"] for row in trainer.summary["generations"]] == ["pp2", "pp2", "single"]
    broken, undisturbed = Run(tmp_path / "faulty"), Run(tmp_path / "quiet")
    assert broken.losses().keys() == set(range(STEPS))
    for step, loss in undisturbed.losses().items():
        assert broken.losses()[step] == pytest.approx(loss, rel=1e-5), f"step {step}"
    assert broken.ids() == expected_ids(faulty, 500)
