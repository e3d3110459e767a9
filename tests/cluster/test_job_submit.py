"""The ways that users take: ``ray job submit --working-dir . -- python jobs/train.py CONFIG``, ``planaria submit``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ray.job_submission import JobSubmissionClient
from tests.support.runs import Run, node_of_worker, wait_for

from planaria.runtime.local_cluster import LocalCluster

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def python_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The jobs' command begins with ``python``: the cluster's own, as in an image or an activated environment."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def _await_agent(cluster: LocalCluster) -> None:
    """The head's job agent comes up after its dashboard; until then a submission is turned away."""
    deadline = time.monotonic() + 90
    while True:
        try:
            JobSubmissionClient(cluster.dashboard).submit_job(entrypoint="true")
            return
        except (RuntimeError, ConnectionError):
            assert time.monotonic() < deadline, "the head takes no jobs"
            time.sleep(0.5)


def _submit(cluster: LocalCluster, storage: Path, emoji: Path, *overrides: str) -> subprocess.Popen[str]:
    _await_agent(cluster)
    sets = [part for override in overrides for part in ("--set", override)]
    variables = f'{{"env_vars": {{"PLANARIA_EMOJI": "{emoji}", "PLANARIA_STORAGE": "{storage}"}}}}'
    command = [
        *(str(Path(sys.executable).parent / "ray"), "job", "submit", "--address", cluster.dashboard),
        *("--working-dir", ".", "--runtime-env-json", variables),
        *("--", "python", "jobs/train.py", "jobs/configs/emoji.yaml", *sets),
    ]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_submitted_job_trains_on_real_pairs_and_survives_a_kill(tmp_path: Path, emoji: Path) -> None:
    with LocalCluster(2, dashboard=True, connect=False) as cluster:
        job = _submit(cluster, tmp_path, emoji, "train.steps=60", "elastic.max_workers=2", "evaluate.samples=16")
        name = "emoji"
        try:
            wait_for(lambda: len(Run(tmp_path, name).metrics) > 25 or job.poll() is not None, 240, "training")
            run = Run(tmp_path, name)
            assert job.poll() is None, job.communicate()[0]
            cluster.kill_node(node_of_worker(cluster, run, run.of("generation")[0]["workers"][1]))
            output, _ = job.communicate(timeout=240)
        finally:
            job.kill()
        assert job.returncode == 0, output
        assert "succeeded" in output.lower()
    run = Run(tmp_path, name)
    losses = run.losses()
    assert sorted(losses) == list(range(60))
    assert sum(losses[step] for step in range(50, 60)) < 0.8 * sum(losses[step] for step in range(10))
    assert [event["layout"] for event in run.of("generation")][:2] == ["dp_shard2", "single"]


@pytest.mark.parametrize("override", ["train.steps=nonsense"])
def test_the_status_of_a_submitted_job_is_true_to_its_failure(tmp_path: Path, override: str) -> None:
    with LocalCluster(1, dashboard=True, connect=False) as cluster:
        job = _submit(cluster, tmp_path, tmp_path, override)
        output, _ = job.communicate(timeout=120)
    assert job.returncode != 0
    assert "train.steps" in output
    assert "failed" in output.lower()


def test_a_stopped_submission_leaves_a_checkpoint(tmp_path: Path, emoji: Path) -> None:
    sets = ["train.steps=5000", "elastic.max_workers=1", "checkpoint.every=5000"]
    environment = os.environ | {"PLANARIA_EMOJI": str(emoji), "PLANARIA_STORAGE": str(tmp_path)}
    with LocalCluster(1, dashboard=True, connect=False) as cluster:
        planaria = [sys.executable, "-m", "planaria"]
        where = ["--address", cluster.dashboard]
        options = [*where, "--submission-id", "emoji-1", "--python", sys.executable]
        command = [*planaria, "submit", str(ROOT / "jobs/configs/emoji.yaml"), *options]
        job = subprocess.Popen(
            [*command, *(part for override in sets for part in ("--set", override))],
            env=environment,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            wait_for(lambda: len(Run(tmp_path, "emoji").metrics) > 5 or job.poll() is not None, 240, "training")
            assert job.poll() is None, job.communicate()[0]
            stop = subprocess.run(
                [*planaria, "stop", "emoji-1", *where], env=environment, capture_output=True, text=True, timeout=120
            )
            output, _ = job.communicate(timeout=60)
        finally:
            if job.poll() is None:
                os.kill(job.pid, signal.SIGKILL)
    run = Run(tmp_path, "emoji")
    assert run.of("stopped")
    step = run.of("checkpoint")[-1]["step"]
    assert step == max(run.losses()) + 1
    assert stop.returncode == 0, stop.stdout + stop.stderr
    assert f"goes on from the checkpoint of step {step}" in stop.stdout
    assert job.returncode == 143, output
    assert output.count("goes on from the checkpoint") == 1, "the log was followed, and nothing of it shown twice"
