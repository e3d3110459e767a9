"""Whole nodes die; the mathematics does not notice."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.forms import long_form
from tests.support.runs import ENDLESS, Run, expected_ids, job, node_of_worker, train_with
from tests.support.scrapes import Scrapes

from planaria.commands.data_audit import audit
from planaria.runtime.local_cluster import LocalCluster

STEPS = 60


def test_two_node_kills_change_dp_and_tp_but_not_the_losses(tmp_path: Path) -> None:
    """dp2 x tp2 on two large nodes and two spares; both large nodes die one after the other."""
    train = {"steps": STEPS, "global_batch": 10, "micro_batch": 4}
    with LocalCluster(0) as cluster:
        for cpus in (2, 2, 1, 1):
            cluster.add_node(cpus)
        faulty = job(tmp_path / "faulty", train=train, layout={"tp": 2}, elastic={"min_workers": 1, "max_workers": 6})

        def kill_a_node_at_work() -> None:
            run = Run(tmp_path / "faulty")
            victim = run.of("generation")[-1]["workers"][0]
            cluster.kill_node(node_of_worker(cluster, run, victim))

        quiet = job(tmp_path / "quiet", train=train, elastic={"min_workers": 2, "max_workers": 2})
        train_with(quiet, {})
        with Scrapes(tmp_path / "faulty") as scrapes:
            trainer = train_with(faulty, {20: kill_a_node_at_work, 40: kill_a_node_at_work})

    layouts = [row["layout"] for row in trainer.summary["generations"]]
    assert layouts == ["dp_shard2xtp2", "tp2", "dp_shard2"]
    broken, undisturbed = Run(tmp_path / "faulty"), Run(tmp_path / "quiet")
    assert broken.losses().keys() == undisturbed.losses().keys() == set(range(STEPS))
    for step, loss in undisturbed.losses().items():
        assert broken.losses()[step] == pytest.approx(loss, rel=1e-5), f"step {step}"
    expected = expected_ids(faulty, 500)
    assert broken.ids() == expected
    assert undisturbed.ids() == expected
    assert all(len(set(ids)) == len(ids) for ids in broken.ids().values())
    assert audit(str(broken.path), None) == 0
    # Survivors live: whoever worked in a later generation had joined before the first fault.
    first_fault = broken.of("fault")[0]["time"]
    joined = {event["member"]: event["time"] for event in broken.of("joined")}
    assert all(joined[member] < first_fault for event in broken.of("generation") for member in event["workers"])
    _metrics_tell_of_it(scrapes, broken)


def _metrics_tell_of_it(scrapes: Scrapes, run: Run) -> None:
    """Counters grow through both kills, and the series of the nodes that died have ended."""
    assert scrapes.falls() == []
    nodes = {event["member"]: event["node"][:8] for event in run.of("joined")}
    worked = [{nodes[member] for member in event["workers"]} for event in run.of("generation")]
    assert scrapes.nodes(0.0) == worked[0] | worked[1] | worked[2]
    assert len((worked[0] | worked[1]) - worked[2]) == 2, "two nodes died at work"
    assert scrapes.nodes(run.of("generation")[2]["time"]) <= worked[2]
    assert scrapes.value("planaria_faults_total") == 2
    assert scrapes.value("planaria_recoveries_total", cause="lost") == 2
    assert scrapes.value("planaria_recovery_seconds_count", phase="restore") == 2
    assert scrapes.value("planaria_generation") == 3
    whole = scrapes.value("planaria_step_seconds_sum", phase="whole")
    parts = [
        value
        for (name, labels), value in scrapes.seen[-1][1].items()
        if name == "planaria_step_seconds_sum" and dict(labels)["phase"] != "whole"
    ]
    assert whole is not None
    assert sum(parts) == pytest.approx(whole, rel=0.05)


@long_form  # the demo shows it, too
def test_a_lost_node_is_replaced_by_one_that_joins(tmp_path: Path) -> None:
    with LocalCluster(3) as cluster:
        config = job(tmp_path, train={"steps": ENDLESS, "global_batch": 12, "micro_batch": 4})

        def kill_and_add() -> None:
            run = Run(tmp_path)
            cluster.kill_node(node_of_worker(cluster, run, run.of("generation")[-1]["workers"][-1]))
            cluster.add_node()

        trainer = train_with(config, {10: kill_and_add}, until=lambda run: run.trains_in(3))
    rows = trainer.summary["generations"]
    assert [row["layout"] for row in rows] == ["dp_shard3", "dp_shard2", "dp_shard3"]
    assert rows[2]["cause"] == "resize"
    # Growing loses no step: the third generation begins where the second ended.
    assert rows[2]["from_step"] == rows[1]["to_step"]
    assert Run(tmp_path).ids() == expected_ids(config, 500, trainer.summary["steps"])
