"""The benchmark of single steps: its figures, and one burst of two contenders on real processes."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.forms import long_form

import step as bench
from _checkpoint.pool import Pool
from _report import check
from _runs import scratch
from _step import ranks


def _row(turn: int, name: str, seconds: float, group: str = "replicated") -> dict[str, Any]:
    return {"group": group, "round": turn, "contender": name, "step": seconds, "memory": 10.0 * turn, "load": 0.5}


def test_a_figure_is_the_median_over_rounds_that_have_both() -> None:
    rows = [_row(turn, bench.REPLICATED, seconds) for turn, seconds in ((1, 1.1), (2, 3.0), (3, 1.0), (4, 9.0))]
    rows += [_row(turn, "ddp", 1.0) for turn in (1, 2, 3)]
    rows.append({"group": "replicated", "contender": "accelerate", "absent": "no such module"})
    result = bench.build_report(rows, "2026-01-31")
    check({**vars(result), "tables": []})
    assert result.figures == {"step_vs_ddp": pytest.approx(1.1)}
    lines = [list(line) for table in result.tables for line in table.rows]
    assert ["ddp", "1.000 (1.000 to 1.000)", "1.100 (1.000 to 3.000)", "30", "0.50"] in lines
    assert ["accelerate", "replicated", "no such module"] in lines


@long_form
def test_a_burst_of_the_engine_and_of_a_peer() -> None:
    work = bench.work_of("replicated")
    with scratch() as (folder, environment):
        losses = {}
        for name in (bench.REPLICATED, "ddp"):
            pool = Pool(bench.RANKS, folder, environment)
            try:
                pool.run(ranks.hold, name, work)
                answers = pool.run(ranks.steps, 2)
            finally:
                pool.close()
            assert all(answer["step"] > 0 and 1 < answer["memory"] < 2000 for answer in answers)
            assert answers[0]["loss"] == pytest.approx(answers[1]["loss"])
            losses[name] = answers[0]["loss"]
    # Fresh weights differ, the task is the same.
    assert losses["ddp"] == pytest.approx(losses[bench.REPLICATED], rel=0.1)
