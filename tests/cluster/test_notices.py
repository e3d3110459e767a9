"""Nodes and workers that are told to leave, and leave without a fault: no step is lost, nothing is recovered."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from tests.support.forms import long_form
from tests.support.runs import ENDLESS, Run, expected_ids, job, node_of_worker, train_with, wait_for

from planaria.runtime.local_cluster import LocalCluster
from planaria.trainer import ElasticTrainer

pytestmark = pytest.mark.timeout(300)
ENDLESS_TRAIN = {"steps": ENDLESS, "global_batch": 6, "micro_batch": 2}


def drain(node_id: str, seconds: float = 120.0) -> None:
    """What Ray does when a pod gets SIGTERM: the node is drained, with a deadline."""
    client = ray._private.worker.global_worker.gcs_client
    preemption = 2  # of DrainNodeReason
    accepted, why = client.drain_node(node_id, preemption, "spot notice", int((time.time() + seconds) * 1000))
    assert accepted, why


def _released(run: Run, prefix: str) -> bool:
    return any(event["member"].startswith(prefix) for event in run.of("dismissed"))


def test_a_drained_node_is_left_at_a_step_boundary_and_released_long_before_its_deadline(tmp_path: Path) -> None:
    config = job(tmp_path, train=ENDLESS_TRAIN, checkpoint={"every": 1000, "at_end": False})
    with LocalCluster(3) as cluster:

        def drain_one() -> None:
            run = Run(tmp_path)
            drain(node_of_worker(cluster, run, run.of("generation")[-1]["workers"][-1]).node_id)

        trainer = train_with(config, {20: drain_one}, until=lambda run: run.trains_in(2) and _released(run, "keeper-"))
    run, done = Run(tmp_path), trainer.summary["steps"]
    first, second = run.of("generation")
    assert (len(first["workers"]), len(second["workers"])) == (3, 2)
    assert set(second["workers"]) < set(first["workers"])
    assert second["source"] == "memory"
    assert not run.of("fault")
    assert not run.of("rollback")
    assert not run.of("lost"), "nobody was lost: those who had to go were dismissed"
    assert run.ids() == expected_ids(config, 500, done)
    assert [row["step"] for row in run.metrics] == list(range(done)), "no step was done twice"
    noticed = run.of("notice")[0]["time"]
    left = [event["time"] for event in run.of("dismissed")]
    gone = set(first["workers"]) - set(second["workers"])
    assert gone < {event["member"] for event in run.of("dismissed")}
    assert max(left) - noticed < 60, "the node need not wait for its deadline"


@long_form
def test_a_worker_that_gets_a_sigterm_leaves_and_is_replaced(tmp_path: Path) -> None:
    config = job(tmp_path, train=ENDLESS_TRAIN, checkpoint={"every": 1000, "at_end": False})
    with LocalCluster(2) as cluster:
        assert cluster.nodes
        end = {20: lambda: os.kill(Run(tmp_path).pids("worker-1"), signal.SIGTERM)}
        trainer = train_with(config, end, until=lambda run: run.trains_in(3))
    run, done = Run(tmp_path), trainer.summary["steps"]
    sizes = [len(event["workers"]) for event in run.of("generation")]
    assert sizes[:2] == [2, 1]
    assert "worker-1" not in run.of("generation")[1]["workers"]
    assert not run.of("fault")
    assert [row["step"] for row in run.metrics] == list(range(done))
    assert run.ids() == expected_ids(config, 500, done)


def test_when_too_few_would_be_left_the_state_is_saved_and_the_job_waits(tmp_path: Path) -> None:
    config = job(
        tmp_path,
        train={"steps": 250, "global_batch": 6, "micro_batch": 2},
        elastic={"min_workers": 2, "max_workers": 2},
        checkpoint={"every": 1000, "at_end": False},
    )
    with LocalCluster(2) as cluster:
        left: list[Any] = []

        def watch(status: dict[str, Any]) -> None:
            run = Run(tmp_path)
            if status["state"] == "running" and status["step"] >= 20 and not left:
                left.append(node_of_worker(cluster, run, "worker-1"))
                drain(left[0].node_id, 6.0)
            elif len(left) == 1 and status["state"] == "waiting" and _released(run, "keeper-"):
                left.append(None)
                cluster.kill_node(left[0])
                cluster.add_node()

        ElasticTrainer(config, watch=watch).fit()
        wait_for(lambda: len(left) == 2, 1, "the wait for another node")
    run = Run(tmp_path)
    assert [len(event["workers"]) for event in run.of("generation")] == [2, 2]
    assert run.of("checkpoint"), "the state was saved before the node was let go"
    assert [row["step"] for row in run.metrics] == list(range(250))
    assert run.ids() == expected_ids(config, 500)
