"""State in the memory of nodes: what two deaths at once, too little memory and a long run do to it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.forms import long_form
from tests.support.runs import ENDLESS, Run, expected_ids, job, node_of_worker, train_with
from tests.support.small_disk import mounted

from planaria.runtime.local_cluster import LocalCluster
from planaria.state.vault import Vault
from planaria.trainer import ElasticTrainer, TrainingFailed


def test_both_holders_of_a_slice_lost_at_once_cost_the_steps_since_the_checkpoint(tmp_path: Path) -> None:
    """Each node's slices lie on it and on the next one; with two of three nodes gone, some lie nowhere."""
    train = {"steps": 40, "global_batch": 12, "micro_batch": 4}
    with LocalCluster(3) as cluster:
        quiet = job(tmp_path / "quiet", train=train)
        train_with(quiet, {})
        faulty = job(tmp_path / "faulty", train=train, checkpoint={"every": 10})

        def kill_two() -> None:
            run = Run(tmp_path / "faulty")
            victims = run.of("generation")[-1]["workers"][:2]
            cluster.kill_node(*(node_of_worker(cluster, run, member) for member in victims))

        train_with(faulty, {26: kill_two})
    broken, undisturbed = Run(tmp_path / "faulty"), Run(tmp_path / "quiet")
    sources = [(event["source"], event["step"]) for event in broken.of("generation")]
    # The two deaths may be heard of one after the other; nothing newer than the checkpoint can come back.
    assert sources[0] == ("start", 0)
    assert sources[-1] == ("checkpoint", 20)
    assert broken.of("rollback")
    assert broken.ids() == expected_ids(faulty, 500)
    for step, loss in undisturbed.losses().items():
        assert broken.losses()[step] == pytest.approx(loss, rel=1e-5), f"step {step}"


@long_form  # keepers are killed in tests/chaos, too
def test_a_killed_keeper_costs_neither_a_worker_nor_a_step(tmp_path: Path) -> None:
    config = job(tmp_path, train={"steps": ENDLESS, "global_batch": 12, "micro_batch": 4}, checkpoint={"every": 1000})
    with LocalCluster(3):
        kill = {10: lambda: os.kill(Run(tmp_path).pids("keeper-0"), signal.SIGKILL)}
        trainer = train_with(config, kill, until=lambda run: run.trains_in(3))
    run = Run(tmp_path)
    assert {event["member"] for event in run.of("lost")} == {"keeper-0"}
    first, second, *later = run.of("generation")
    assert (len(first["workers"]), len(second["workers"]), second["source"]) == (3, 2, "memory")
    # The worker of that node takes part again, the same process, once the node has another keeper.
    assert set(later[-1]["workers"]) == set(first["workers"])
    complete = max(row["complete"] or 0 for row in run.metrics if row["gen"] == 1)
    assert second["step"] >= complete > 0
    assert run.ids() == expected_ids(config, 500, trainer.summary["steps"])


def test_a_run_that_another_controller_has_taken_over_ends_and_says_so(tmp_path: Path) -> None:
    config = job(tmp_path, train={"steps": 2000, "global_batch": 6}, checkpoint={"every": 10})
    with LocalCluster(3), pytest.raises(TrainingFailed, match="the next submission"):
        train_with(config, {15: lambda: Vault(tmp_path / "run").claim("the next submission")})
    checkpoint = Vault(tmp_path / "run").latest_intact(deep=True)
    assert checkpoint is not None
    with checkpoint:
        assert checkpoint.step >= 10


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Path]:
    """A memory file system of 256 KiB."""
    with mounted(tmp_path / "shm", "256k") as folder:
        yield folder


def test_too_little_shared_memory_is_told_with_both_sizes_before_training_starts(
    tmp_path: Path, small_memory: Path
) -> None:
    config = job(tmp_path, elastic={"max_workers": 2}, memory={"folder": str(small_memory)})
    with LocalCluster(2), pytest.raises(TrainingFailed, match=r"[\d,]+ bytes are needed .* 262,144 are free.*--shm"):
        ElasticTrainer(config).fit()
    assert not Run(tmp_path).metrics


@pytest.mark.solo  # it asks how much shared memory the machine has left
def test_memory_stays_constant_and_is_given_back(tmp_path: Path) -> None:
    used: dict[str, set[int]] = {}

    def watch(status: dict[str, Any]) -> None:
        if status["step"] > 100:
            for node, count in status["memory"].items():
                used.setdefault(node, set()).add(count)

    before = os.statvfs("/dev/shm").f_bfree
    config = job(
        tmp_path,
        train={"steps": 500, "global_batch": 4, "micro_batch": 2},
        elastic={"max_workers": 2},
        checkpoint={"every": 50},
    )
    with LocalCluster(2):
        ElasticTrainer(config, watch=watch).fit()
    assert len(used) == 2
    assert all(len(counts) == 1 for counts in used.values()), used
    assert os.statvfs("/dev/shm").f_bfree >= before - 256  # a megabyte, for what others do
    assert not Run(tmp_path).of("unreplicated")
