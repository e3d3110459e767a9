"""The controller, its driver, or both are killed for real; training goes on, or ends as configured."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.forms import long_form
from tests.support.runs import ENDLESS, Run, expected_ids, job, train_with, wait_for
from tests.support.scrapes import Scrapes

from planaria.observe.record import read_lines
from planaria.runtime.local_cluster import LocalCluster

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(2) as found:
        yield found


def actors(cluster: LocalCluster, kind: str) -> list[psutil.Process]:
    """Processes of actors of one class, found by the names that Ray gives them."""
    found = []
    for node in [cluster.cluster.head_node, *cluster.nodes]:
        for process in cluster.processes_of(node):
            with contextlib.suppress(psutil.Error):  # ended meanwhile
                if f"::{kind}" in " ".join(process.cmdline()[:1]):
                    found.append(process)
    return found


def kill_controller(cluster: LocalCluster) -> None:
    (process,) = actors(cluster, "Controller")
    process.kill()


def check(run: Run, config: Any, samples: int = 500, steps: int | None = None) -> None:
    """Every step was done (of ``steps``; default: all), and consumed what it had to."""
    assert run.ids() == expected_ids(config, samples, steps)
    assert sorted(run.losses()) == list(range(config.train.steps if steps is None else steps))


def _after_a_return(run: Run) -> bool:
    """Whether steps were done since the controller has returned."""
    back = run.of("returned")
    return bool(back) and run.metrics[-1]["time"] > back[0]["time"] + 1.0


@long_form  # the controller is killed in tests/chaos, too, which has a short form
def test_training_goes_on_while_the_controller_is_gone_and_it_takes_the_generation_up_again(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    config = job(tmp_path, train={"steps": ENDLESS, "global_batch": 6, "micro_batch": 2}, checkpoint={"every": 50})
    with Scrapes(tmp_path) as scrapes:
        trainer = train_with(config, {20: lambda: kill_controller(cluster)}, until=_after_a_return)
    run, done = Run(tmp_path), trainer.summary["steps"]
    assert scrapes.falls() == []
    assert scrapes.value("planaria_controller_returns_total") == 1
    assert scrapes.value("planaria_faults_total") == 0
    check(run, config, steps=done)
    assert len(run.of("returned")) == 1
    assert len(run.of("generation")) == 1, "the generation went on, nothing was formed anew"
    returned = run.of("returned")[0]["time"]
    row_before = max(row["step"] for row in run.metrics if row["time"] < returned)
    # Steps that were done while nobody listened are on record, each once.
    steps = [row["step"] for row in run.metrics]
    assert steps == sorted(set(steps))
    assert row_before < done - 1
    assert run.of("checkpoint")[-1]["step"] == done


@long_form
def test_a_worker_lost_together_with_the_controller_is_noticed_when_it_returns(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    config = job(tmp_path, train={"steps": 120, "global_batch": 6, "micro_batch": 2}, checkpoint={"every": 1000})

    def kill_both(cluster: LocalCluster) -> None:
        victim = Run(tmp_path).pids("worker-1")
        kill_controller(cluster)
        os.kill(victim, signal.SIGKILL)

    train_with(config, {20: lambda: kill_both(cluster)})
    run = Run(tmp_path)
    check(run, config)
    second = run.of("generation")[1]
    assert second["source"] == "memory"
    assert "worker-0" in second["workers"]
    assert run.pids("worker-0") == [e["pid"] for e in run.of("joined") if e["member"] == "worker-0"][-1]


DRIVER = """
import json, sys
import ray
from planaria.config import parse
from planaria.trainer import ElasticTrainer
ray.init(address=sys.argv[1], log_to_driver=False)
ElasticTrainer(parse(json.loads(sys.argv[2]))).fit()
"""


def start_driver(cluster: LocalCluster, config: Any) -> subprocess.Popen[bytes]:
    """A driver in a process of its own."""
    arguments = [sys.executable, "-c", DRIVER, cluster.address, json.dumps(config.model_dump(mode="json"))]
    return subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def steps_done(run_dir: Path) -> int:
    return len(read_lines(run_dir / "metrics.jsonl"))


@pytest.mark.parametrize("choice", ["stop", pytest.param("continue", marks=long_form)])
def test_a_job_whose_driver_is_killed_ends_with_a_checkpoint_or_goes_on(
    cluster: LocalCluster, tmp_path: Path, choice: str
) -> None:
    config = job(
        tmp_path,
        train={"steps": 100_000 if choice == "stop" else 150, "global_batch": 6, "micro_batch": 2},
        elastic={"orphan_s": 3.0, "on_driver_loss": choice},
        checkpoint={"every": 100_000},
    )
    driver = start_driver(cluster, config)
    wait_for(lambda: steps_done(tmp_path / "run") > 10, 120, "the tenth step")
    driver.kill()
    driver.wait()
    wait_for((tmp_path / "run" / "summary.json").exists, 90, "the end of the job")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["state"] == ("stopped" if choice == "stop" else "finished")
    assert summary["checkpoint_step"] == summary["steps"] >= 10
    for kind in ("Worker", "KeeperActor", "Loader", "Controller"):
        wait_for(lambda kind=kind: not actors(cluster, kind), 30, f"the end of every {kind}")


def test_a_new_submission_takes_a_running_job_over(cluster: LocalCluster, tmp_path: Path) -> None:
    config = job(
        tmp_path,
        train={"steps": 100_000, "global_batch": 6, "micro_batch": 2},
        elastic={"on_driver_loss": "continue", "orphan_s": 5.0},
        checkpoint={"every": 100_000},
    )
    driver = start_driver(cluster, config)
    wait_for(lambda: steps_done(tmp_path / "run") > 10, 120, "the tenth step")
    driver.kill()
    driver.wait()
    time.sleep(1.0)
    done = steps_done(tmp_path / "run")
    tree = config.model_dump(mode="json")
    tree["train"]["steps"] = done + 60
    second = start_driver(cluster, type(config).model_validate(tree))
    assert second.wait(180) == 0
    run = Run(tmp_path)
    assert run.of("resumed"), "it goes on from the checkpoint of the one before"
    assert sorted(run.losses()) == list(range(max(run.losses()) + 1))
