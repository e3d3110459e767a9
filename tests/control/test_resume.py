"""Which checkpoint a generation starts from."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from tests.support.runs import job

from planaria.control.failure import JobFailed
from planaria.control.resume import Resume
from planaria.data.identity import DataIdentity
from planaria.state.boxes import Box
from planaria.state.vault import Vault
from planaria.state.writer import Piece


class Shelf:
    """A run directory with checkpoints, and what is told about them."""

    def __init__(self, folder: Any) -> None:
        self.job = job(folder)
        self.vault = Vault(folder, keep_last=2)
        self.told: list[tuple[str, int]] = []
        self.resume = Resume(self.vault, self.job, str(folder), self._tell)

    def _tell(self, kind: str, text: str, **fields: Any) -> None:
        self.told.append((kind, fields["step"]))

    def save(self, step: int, attempt: str) -> None:
        writer = self.vault.writer(step, attempt)
        data = torch.full((4,), float(step))
        slices = writer.write_shard(0, [Piece("weight", (4,), Box.whole((4,)), data)])
        writer.commit(slices, {"job": self.job.model_dump(mode="json")})


@pytest.fixture
def shelf(tmp_path) -> Shelf:
    found = Shelf(tmp_path)
    found.save(10, "a")
    found.save(20, "a")
    return found


def test_a_damaged_checkpoint_is_told_once_and_never_offered_again(shelf: Shelf) -> None:
    assert shelf.resume.step() == 20
    shelf.resume.damaged("its bytes do not match")
    assert [shelf.resume.step(), shelf.resume.step()] == [10, 10]
    assert shelf.told.count(("checkpoint_damaged", 20)) == 1


def test_the_checkpoint_that_replaces_a_damaged_one_is_offered(shelf: Shelf) -> None:
    shelf.resume.step()
    shelf.resume.damaged("its bytes do not match")
    assert shelf.resume.step() == 10
    shelf.save(20, "b")
    assert shelf.resume.step() == 20
    shelf.save(30, "b")
    assert shelf.resume.step() == 30
    shelf.resume.damaged("its bytes do not match, either")
    assert shelf.resume.step() == 20


def test_the_job_ends_when_all_are_damaged(shelf: Shelf) -> None:
    for _ in range(2):
        shelf.resume.step()
        shelf.resume.damaged("its bytes do not match")
    with pytest.raises(JobFailed, match="none of the 2 checkpoints"):
        shelf.resume.step()


def test_a_run_whose_checkpoints_are_gone_does_not_start_afresh(tmp_path) -> None:
    shelf = Shelf(tmp_path)
    assert shelf.resume.step() is None
    shelf.save(10, "a")
    assert shelf.resume.step(saved=10) == 10
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(JobFailed, match="step 10 had been saved"):
        shelf.resume.step(saved=10)


def test_other_training_data_are_refused_until_somebody_accepts_them(shelf: Shelf, tmp_path) -> None:
    before = DataIdentity(30, "d", (("a.tar", 1, 10), ("b.tar", 2, 20)))
    writer = shelf.vault.writer(30, "a")
    slices = writer.write_shard(0, [Piece("weight", (4,), Box.whole((4,)), torch.zeros(4))])
    writer.commit(slices, {"job": shelf.job.model_dump(mode="json"), "data": before.as_tree()})

    def resume(data: DataIdentity | None, **section: Any) -> int | None:
        return Resume(shelf.vault, job(tmp_path, data=section), str(tmp_path), lambda *_, **__: None, data).step()

    assert resume(before) == 30
    other = DataIdentity(10, "e", (("a.tar", 1, 10),))
    with pytest.raises(JobFailed, match=r"removed: b\.tar; 30 samples before, 10 now.*data\.accept_changes=true"):
        resume(other)
    assert resume(other, accept_changes=True) == 30
    assert resume(None) == 30  # of a recipe that does not tell
