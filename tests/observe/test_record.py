"""The run directory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from planaria.observe.record import RunRecord, read_lines, set_digest


def test_lines_are_whole_at_once_and_torn_ones_are_left_out(tmp_path: Path) -> None:
    record = RunRecord(tmp_path)
    record.event("joined", "worker-0 is ready", member="worker-0")
    record.metrics({"step": 0, "loss": 1.5})
    assert read_lines(tmp_path / "events.jsonl")[0]["member"] == "worker-0"
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 1, "lo')
    assert [row["step"] for row in read_lines(tmp_path / "metrics.jsonl")] == [0]
    assert read_lines(tmp_path / "absent.jsonl") == []


def test_lines_that_cannot_be_written_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = RunRecord(tmp_path)
    record.metrics({"step": 0})
    full = _FullDisk(record._files["metrics"])
    monkeypatch.setitem(record._files, "metrics", full)
    for step in range(1, 4):
        record.metrics({"step": step})
    full.full = False
    record.metrics({"step": 4})
    assert [row["step"] for row in read_lines(tmp_path / "metrics.jsonl")] == list(range(5))


class _FullDisk:
    """A file whose disk takes five more bytes and then none."""

    def __init__(self, file: object) -> None:
        self.file, self.full, self.left = file, True, 5

    def fileno(self) -> int:
        number: int = self.file.fileno()  # type: ignore[attr-defined]
        return number

    def write(self, data: bytes) -> int:
        if self.full and not self.left:
            raise OSError(28, "No space left on device")
        written: int = self.file.write(data[: self.left] if self.full else data)  # type: ignore[attr-defined]
        self.left = 0
        return written


def test_a_digest_depends_on_the_set_alone(tmp_path: Path) -> None:
    assert set_digest([3, 1, 2]) == set_digest([1, 2, 3])
    assert len({set_digest(ids) for ids in ([], [1], [2], [1, 2], [1, 1], [12])}) == 6
    record = RunRecord(tmp_path)
    record.ledger(7, 1, [5, 4], whole=True)
    record.ledger(8, 1, [5, 4], whole=False)
    rows = read_lines(tmp_path / "ledger.jsonl")
    assert rows[0] == {"step": 7, "gen": 1, "ids": [5, 4]}
    assert rows[1] == {"step": 8, "gen": 1, "count": 2, "digest": set_digest([4, 5])}


def test_records_go_on_in_new_files_after_their_folder_was_removed(tmp_path: Path) -> None:
    record = RunRecord(tmp_path / "run")
    record.event("before", "lost with its file")
    shutil.rmtree(tmp_path / "run")
    record.event("after", "kept")
    record.close()
    assert [row["event"] for row in read_lines(tmp_path / "run" / "events.jsonl")] == ["after"]
