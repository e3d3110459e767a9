"""Damaged data and full disks, for real."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.data.pictures import pairs, write_shard
from tests.support.forms import long_form
from tests.support.runs import Run, job, train_with, wait_for
from tests.support.small_disk import mounted

from planaria.config import ConfigError
from planaria.data.errors import DataError
from planaria.runtime.local_cluster import LocalCluster
from planaria.state.vault import Vault
from planaria.trainer import ElasticTrainer, TrainingFailed

STEPS = {"steps": 60, "global_batch": 8, "micro_batch": 4}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Two shards of 40 pairs each."""
    for shard in range(2):
        write_shard(tmp_path / f"train-{shard}.tar", pairs(40, f"{shard}-"))
    return tmp_path


def _data(shards: Path, share: float) -> dict[str, object]:
    return {"source": "webdataset", "path": str(shards / "train-*.tar"), "max_bad_fraction": share, "prefetch": 1}


def test_a_missing_file_is_told_before_any_process_starts(tmp_path: Path) -> None:
    config = job(tmp_path, data={"source": "webdataset", "path": str(tmp_path / "nowhere-*.tar")})
    with pytest.raises(DataError, match="nowhere"):
        ElasticTrainer(config).fit()


def test_an_impossible_tp_is_told_before_any_process_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"layout\.tp.*num_key_value_heads=2"):
        ElasticTrainer(job(tmp_path, layout={"tp": 4}, elastic={"max_workers": 4})).fit()


def test_a_shard_that_is_damaged_during_training_costs_only_its_samples(tmp_path: Path, shards: Path) -> None:
    config = job(tmp_path, data=_data(shards, 1.0), train=STEPS, elastic={"max_workers": 2})
    with LocalCluster(2):
        trainer = train_with(config, {5: lambda: _damage(shards / "train-0.tar")})
    run = Run(tmp_path)
    assert trainer.summary["state"] == "finished"
    assert len(trainer.summary["generations"]) == 1
    assert trainer.summary["bad_samples"] == len(run.of("bad_sample")) > 0
    assert all("train-0" in event["key"] for event in run.of("bad_sample"))
    assert all(len(ids) == 8 for ids in run.ids().values()), "the global batch keeps its size"


def test_too_many_damaged_samples_stop_the_job_with_the_reason(tmp_path: Path, shards: Path) -> None:
    config = job(tmp_path, data=_data(shards, 0.005), train=STEPS | {"steps": 2000}, elastic={"max_workers": 2})
    with LocalCluster(2), pytest.raises(TrainingFailed, match=r"damaged.*max_bad_fraction=0\.005.*train-0"):
        train_with(config, {5: lambda: _damage(shards / "train-0.tar")})


def _damage(shard: Path) -> None:
    with shard.open("r+b") as file:
        file.write(os.urandom(shard.stat().st_size))


def _fill(ballast: Path) -> None:
    """Write until the disk is full."""
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    with mounted(tmp_path / "disk", "4m") as folder:
        yield folder


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    config = job(
        small_disk, train={"steps": 60, "global_batch": 8}, elastic={"max_workers": 2}, checkpoint={"every": 5}
    )
    with LocalCluster(2):
        trainer = train_with(config, {10: lambda: _fill(ballast), 30: ballast.unlink})
    assert trainer.summary["state"] == "finished"
    assert trainer.summary["checkpoint_step"] == 60
    failed = Run(small_disk).of("checkpoint_failed")
    assert failed
    assert all("no space" in event["text"] for event in failed)
    assert len(trainer.summary["generations"]) == 1


@long_form
def test_a_full_disk_at_the_last_checkpoint_fails_the_job_and_keeps_the_older_one(small_disk: Path) -> None:
    config = job(
        small_disk, train={"steps": 40, "global_batch": 8}, elastic={"max_workers": 2}, checkpoint={"every": 5}
    )

    def fill() -> None:
        durable = Vault(small_disk / "run")
        wait_for(lambda: any(info.step >= 10 for info in durable.list("names")), 30, "the checkpoint of step 10")
        _fill(small_disk / "ballast")

    with LocalCluster(2), pytest.raises(TrainingFailed, match="no space"):
        train_with(config, {10: fill})
    checkpoint = Vault(small_disk / "run").latest_intact(deep=True)
    assert checkpoint is not None
    with checkpoint:
        assert checkpoint.step >= 10
