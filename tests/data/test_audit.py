"""The audit proves exactly-once where it holds, and finds what breaks it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from planaria.cli import app
from planaria.data.audit import Course, audit, set_digest
from planaria.data.order import candidate, index_at

COURSE = Course(samples=23, global_batch=4, seed=5, shuffle=True)


def rows(course: Course, steps: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"step": step, "ids": course.expected(step)} for step in range(start, start + steps)]


def test_an_epoch_and_its_half_are_proven() -> None:
    found = audit(rows(COURSE, 23), COURSE)  # 92 samples: four epochs
    assert found.proven and (found.steps, found.consumed, found.epochs) == (23, 92, 4.0)
    counts = Counter(index for row in rows(COURSE, 23) for index in row["ids"])
    assert set(counts.values()) == {4} and len(counts) == 23


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 8)), max_size=5), st.booleans())
def test_steps_done_again_after_going_back_count_once(jumps: list[tuple[int, int]], digests: bool) -> None:
    written: list[dict[str, Any]] = []
    step = 0
    for forward, back in jumps:
        written += rows(COURSE, forward, step)
        step = max(0, step + forward - back)
    written += rows(COURSE, 3, step)
    if digests:
        written = [{"step": r["step"], "count": 4, "digest": set_digest(r["ids"])} for r in written]
    found = audit(written, COURSE)
    assert found.proven and found.steps == step + 3 and found.redone == len(written) - (step + 3)


@pytest.mark.parametrize("digests", [False, True])
def test_a_sample_too_many_or_too_few_is_found(digests: bool) -> None:
    written = rows(COURSE, 6)
    missed, written[4]["ids"][1] = written[4]["ids"][1], written[4]["ids"][0]
    twice = written[4]["ids"][0]
    if digests:
        written = [{"step": r["step"], "count": 4, "digest": set_digest(r["ids"])} for r in written]
    found = audit(written, COURSE)
    assert not found.proven and [one.step for one in found.differences] == [4]
    if not digests:
        assert (found.differences[0].missed, found.differences[0].surplus) == ([missed], [twice])


def test_gaps_prove_nothing() -> None:
    written = rows(COURSE, 6)
    written[2]["missing"] = [1]
    del written[4]
    found = audit(written, COURSE)
    assert not found.proven and found.unknown == [2, 4] and not found.differences
    assert not audit([], COURSE).proven


def test_substitutes_and_windows_belong_to_the_course() -> None:
    course = Course(samples=23, global_batch=4, seed=5, shuffle=True, windows=((1, 2),), damaged={13: 2})
    assert course.expected(0) == COURSE.expected(0)
    assert course.expected(1)[0] == index_at(12, 23, 5, True)
    assert course.expected(1)[1] == candidate(13, 2, 23, 5, True) != index_at(13, 23, 5, True)
    found = audit(rows(course, 5), course)
    assert found.proven and found.substitutes == 1
    assert not audit(rows(course, 5), COURSE).proven


def test_the_command_reads_a_run_directory(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps({"seed": 5, "train": {"global_batch": 4}, "data": {"shuffle": True}}))
    (tmp_path / "environment.json").write_text(json.dumps({"data": {"samples": 23, "digest": "", "shards": []}}))
    events = [{"event": "bad_sample", "position": 13, "attempt": 0, "index": 1}] * 2  # told twice, met once
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in events))
    course = Course(23, 4, 5, True, damaged={13: 1})
    written = rows(course, 8)
    (tmp_path / "ledger.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    done = CliRunner().invoke(app, ["data", "audit", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "exactly once" in done.output and "32 of a data set of 23" in done.output
    written[6]["ids"][0] = written[5]["ids"][0]
    (tmp_path / "ledger.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    done = CliRunner().invoke(app, ["data", "audit", str(tmp_path)])
    assert done.exit_code == 1 and "NOT EXACTLY ONCE" in done.output and "step 6: missed" in done.output
    (tmp_path / "environment.json").write_text("{}")
    done = CliRunner().invoke(app, ["data", "audit", str(tmp_path)])
    assert done.exit_code == 2 and "--samples" in done.output
