"""Single processes die: a worker, a data loader, the job's own shell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml
from tests.support.forms import long_form
from tests.support.runs import ENDLESS, Run, expected_ids, job, train_with, wait_for

from planaria.runtime.local_cluster import LocalCluster
from planaria.state.vault import Vault

SAMPLES = 500


@long_form  # workers are killed in tests/chaos, too
def test_a_killed_worker_is_replaced(tmp_path: Path) -> None:
    config = job(tmp_path, train={"steps": ENDLESS, "global_batch": 12, "micro_batch": 4})
    with LocalCluster(2) as cluster:
        assert cluster.address
        kill = {10: lambda: os.kill(Run(tmp_path).pids("worker-1"), signal.SIGKILL)}
        trainer = train_with(config, kill, until=lambda run: run.trains_in(3))
    run = Run(tmp_path)
    assert [row["layout"] for row in trainer.summary["generations"]] == ["dp_shard2", "single", "dp_shard2"]
    assert [event["member"] for event in run.of("fault")] == ["worker-1"]
    assert run.of("generation")[2]["workers"] == ["worker-0", "worker-2"]
    assert run.ids() == expected_ids(config, SAMPLES, trainer.summary["steps"])


@long_form  # workers are frozen in tests/chaos, too
def test_a_frozen_worker_is_found_and_fenced(tmp_path: Path) -> None:
    """SIGSTOP: the process lives, its connections too, but it says nothing; it must not train on when it wakes."""
    config = job(tmp_path, elastic={"max_workers": 2, "silence_s": 3.0}, train={"steps": 60, "global_batch": 12})
    with LocalCluster(2):
        train_with(config, {10: lambda: os.kill(Run(tmp_path).pids("worker-0"), signal.SIGSTOP)})
        run = Run(tmp_path)
        assert [event["member"] for event in run.of("fault")] == ["worker-0"]
        assert "silent" in run.of("fault")[0]["text"]
        wait_for(lambda: not _alive(run.pids("worker-0")), 10, "the end of the frozen worker")
    assert run.ids() == expected_ids(config, SAMPLES)


@long_form  # loaders are killed in tests/chaos, too
def test_killed_loaders_cost_neither_a_generation_nor_time(tmp_path: Path) -> None:
    """All of them at once: until others are there, which takes seconds, the ranks build for themselves."""
    config = job(tmp_path, elastic={"max_workers": 2}, train={"steps": 80, "global_batch": 12, "micro_batch": 4})
    killed = ["loader-0", "loader-1"]

    def kill() -> None:
        for member in killed:
            os.kill(Run(tmp_path).pids(member), signal.SIGKILL)

    with LocalCluster(2):
        trainer = train_with(config, {10: kill})
    run = Run(tmp_path)
    assert len(trainer.summary["generations"]) == 1
    assert sorted(event["member"] for event in run.of("lost")) == killed
    assert max(row["data_wait_s"] for row in run.metrics[1:]) < 2.0
    assert run.ids() == expected_ids(config, SAMPLES)


@long_form  # tests/chaos ends its job by SIGTERM, and a submission goes on later in test_object_store.py
@pytest.mark.parametrize(("sign", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_job_leaves_a_checkpoint_and_goes_on_later(tmp_path: Path, sign: int, code: int) -> None:
    """Ctrl-C and ``ray job stop`` (SIGTERM), on the ``jobs/train.py`` entry."""
    config = job(tmp_path, train={"steps": 5000, "global_batch": 4}, checkpoint={"every": 1000})
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
    run_dir = tmp_path / "run"
    command = [sys.executable, "jobs/train.py", str(file), "--set", "elastic.max_workers=1"]
    environment = os.environ | {"PYTHONPATH": "platform"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_for(lambda: len(Run(tmp_path).metrics) > 5 or process.poll() is not None, 120, "training")
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(sign)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code, output
    assert "Traceback" not in output
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    checkpoint = Vault(run_dir).latest_intact(deep=True)
    assert checkpoint is not None
    with checkpoint:
        steps = checkpoint.step
    assert steps == max(row["step"] for row in Run(tmp_path).metrics) + 1

    again = subprocess.run(
        [*command, "--set", f"train.steps={steps + 5}"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert again.returncode == 0, again.stdout + again.stderr
    run = Run(tmp_path)
    assert run.of("resumed")[0]["step"] == steps
    assert sorted(run.losses()) == list(range(steps + 5))
    assert len(run.metrics) == steps + 5, "no step was done twice"


def _alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
