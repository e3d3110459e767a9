"""The run directory."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.data.audit import set_digest
from planaria.observe.record import RunRecord, finite, read_lines


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


json_trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


def _alike(found: Any, given: Any) -> bool:
    if isinstance(given, float) and not math.isfinite(given):
        return found is None
    if isinstance(given, dict):
        return found.keys() == given.keys() and all(_alike(found[key], given[key]) for key in given)
    if isinstance(given, list):
        return len(found) == len(given) and all(map(_alike, found, given))
    return type(found) is type(given) and found == given


@given(json_trees)
def test_what_is_written_is_json_whatever_the_numbers(tree: Any) -> None:
    assert _alike(json.loads(json.dumps(finite(tree), allow_nan=False)), tree)


def test_a_step_that_was_not_finite_is_a_row_like_any_other(tmp_path: Path) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    record = RunRecord(tmp_path)
    record.metrics({"step": 3, "loss": math.nan, "grad_norm": math.inf, "lr": 0.5})
    record.event("skipped", "step 3", norms=(1.0, -math.inf))
    record.summary({"loss": math.nan})
    record.job({"nested": [{"x": math.inf}]})
    lines = [line for name in ("metrics", "events") for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
    rows = [json.loads(line, parse_constant=refuse) for line in lines]
    assert (rows[0]["loss"], rows[0]["grad_norm"], rows[0]["lr"]) == (None, None, 0.5)
    assert rows[1]["norms"] == [1.0, None]
    for name in ("summary", "job"):
        json.loads((tmp_path / f"{name}.json").read_text(), parse_constant=refuse)
