"""The overhead benchmark: its figures, and one small run of the bare script."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.support.forms import long_form

import _scraped
import overhead
from _measure import Step
from _peers.work import Work
from _report import check
from _runs import carried_out
from planaria.observe.record import read_lines


def test_the_pace_leaves_the_warm_up_out_and_stalls_in():
    times = [10.0 * n for n in range(1, 101)] + [1000.0 + n for n in range(1, 20)] + [1030.0]
    found = overhead.pace([Step(n + 1, at, "a") for n, at in enumerate(times)])
    assert found == {"step_seconds": 1.5, "median_step_seconds": 1.0, "steps": 20}
    with pytest.raises(ValueError, match="only 5"):
        overhead.pace([Step(n, float(n), "a") for n in range(5)])


def test_only_the_generation_with_all_workers_is_measured(tmp_path):
    work = replace(overhead.planned(overhead.parse([])), folder=str(tmp_path))
    run_dir = tmp_path / "bench"
    run_dir.mkdir()
    events = [
        {"time": 0.0, "event": "generation", "gen": 1, "workers": ["a"]},
        {"time": 3.0, "event": "generation", "gen": 2, "workers": ["a", "b"]},
    ]
    rows = [{"gen": 1, "step": 0, "time": 1.0}] + [{"gen": 2, "step": n, "time": 3.0 + n} for n in range(1, 131)]
    rows = [row | {"data_wait_s": 0.25, "snapshot_s": 0.125, "layout": "dp_shard2"} for row in rows]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run_dir / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in events))
    found = overhead.planaria_figures(work)
    assert (found["step_seconds"], found["steps"], found["data_wait_s"]) == (1.0, 30, 0.25)
    rows[20]["gen"] = events[0]["gen"] = 3
    events[0]["workers"].append("c")
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run_dir / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in events))
    with pytest.raises(ValueError, match="disturbed"):
        overhead.planaria_figures(work)


def test_the_figure_is_the_median_over_whole_pairs():
    def row(pair: int, name: str, seconds: float) -> dict[str, Any]:
        parts = {"data_wait_s": 0.01, "snapshot_s": 0.01} if name == "planaria" else {}
        common = {"pair": pair, "contender": name, "load": 0.5, "layout": "dp_shard2"}
        return common | {"step_seconds": seconds, "median_step_seconds": seconds, "steps": 90} | parts

    rows = [row(pair, "torchrun", 0.2) for pair in (1, 2, 3)]
    rows += [row(pair, "planaria", seconds) for pair, seconds in ((1, 0.22), (2, 0.3), (3, 0.21), (4, 9.0))]
    rows.append({"pair": 4, "contender": "torchrun", "load": 0.5, "absent": "exit code 1"})
    result = overhead.build_report(rows, overhead.planned(overhead.parse([])), "2026-01-31")
    check({**vars(result), "tables": []})
    assert result.figures == {"overhead_vs_torchrun": pytest.approx(1.1)}
    lines = [list(line) for table in result.tables for line in table.rows]
    assert ["2", "0.3000", "0.2000", "1.500", "0.50", "0.50"] in lines and ["torchrun", "4", "exit code 1"] in lines


def test_scraped_windows_stand_beside_their_neighbours(tmp_path):
    """Steps of 0.5 s, 0.55 s where scraped, in windows of five seconds; the machine grows slower all the while."""
    times, at, windows = [], 0.0, 7
    while at < windows * _scraped.WINDOW_S:
        at += 0.5 * (1.1 if int(at / _scraped.WINDOW_S) % 2 == 0 else 1.0) * (1.0 + 0.01 * int(at / _scraped.WINDOW_S))
        times.append(at)
    steps = [Step(n + 1, time, "1") for n, time in enumerate([*range(-90, 0), *times])]
    scraper = _scraped.Scraper(tmp_path / "events.jsonl", 0.0, [0.0, 1.0, 10.5, 20.5, 30.5], [0.01])
    found = _scraped.compared(steps, scraper, warm_up=90)
    assert found["ratio"] == pytest.approx(1.1, rel=1e-3)
    assert found["windows"] == 2, "the first and the last window have one neighbour only"
    row = {"contender": _scraped.SCRAPED, "load": 0.5} | found
    result = overhead.build_report([row], overhead.planned(overhead.parse([])), "2026-01-31")
    assert result.figures == {"metrics_overhead": found["ratio"]}
    with pytest.raises(ValueError, match="take more steps"):
        _scraped.compared(steps[:95], scraper, warm_up=90)
    with pytest.raises(ValueError, match="served no metrics"):
        _scraped.compared(steps, _scraped.Scraper(tmp_path / "events.jsonl"), warm_up=90)


def test_both_do_the_same_work():
    work = overhead.planned(overhead.parse([]))
    job = work.job("bench")
    assert (job.memory.every, job.memory.replicas, job.train.global_batch) == (1, 1, work.global_batch)
    assert work.checkpoint_every < work.steps - overhead.WARM_UP  # a checkpoint falls into what is measured


@long_form
def test_the_bare_script_trains():
    work = Work("", nodes=2, global_batch=4, micro_batch=2, steps=4, kill_after=0)
    with carried_out("bare", work, 120.0, None, None) as (done, ending):
        assert ending is None
        rows = read_lines(done.path / "steps.jsonl")
        assert [(row["step"], row["world"]) for row in rows] == [(1, 2), (2, 2), (3, 2), (4, 2)]
        assert all(0 < row["loss"] < 20 for row in rows)
