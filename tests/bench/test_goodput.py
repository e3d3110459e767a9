"""The goodput benchmark: what counts, and what the report says of it."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

import goodput
from _measure import NoRecovery, Step, productive
from _peers import fault
from _peers.work import Work
from _report import check


def steps(first: int, last: int, start: float, incarnation: str, pace: float = 1.0, world: int = 3) -> list[Step]:
    return [Step(n, start + pace * (n - first), incarnation, world) for n in range(first, last + 1)]


def test_an_undisturbed_run_is_all_productive():
    found = productive(steps(1, 11, 5.0, "a"), first_fault=15.0, end=15.0)
    assert (found.wall_seconds, found.steps, found.committed) == (10.0, 10, 10)
    assert found.goodput == found.at_undisturbed_pace == pytest.approx(1.0)


def test_undone_steps_do_not_count_and_redone_ones_count_once():
    log = steps(1, 25, 0.0, "a") + steps(21, 30, 40.0, "b", pace=2.0, world=2)
    found = productive(log, first_fault=24.5, end=60.0)
    assert (found.steps, found.committed) == (34, 29)
    # 2 to 20 at 1 s; the first step of b at the median of its own world size; 22 to 30 at 2 s.
    assert found.productive_seconds == pytest.approx(19 + 2 + 18)
    assert found.goodput == pytest.approx(39 / 60)
    assert found.at_undisturbed_pace == pytest.approx(29 / 60)


def test_steps_beyond_a_rollback_that_were_never_reached_again_do_not_count():
    log = steps(1, 25, 0.0, "a") + steps(11, 13, 40.0, "b")
    assert productive(log, first_fault=24.5, end=45.0).committed == 9 + 3


def test_nothing_after_the_end_counts():
    assert productive(steps(1, 30, 0.0, "a"), first_fault=10.0, end=10.5).committed == 10


def test_a_first_step_is_no_longer_than_the_time_there_was():
    log = [*steps(1, 5, 0.0, "a"), Step(6, 4.25, "b", 3), Step(7, 5.25, "b", 3)]
    assert productive(log, first_fault=4.1, end=6.0).productive_seconds == pytest.approx(4 + 0.25 + 1)


def test_too_little_to_measure_is_said():
    with pytest.raises(NoRecovery, match="before the first fault"):
        productive([*steps(1, 1, 0.0, "a"), *steps(2, 9, 20.0, "b")], first_fault=10.0, end=30.0)
    with pytest.raises(NoRecovery):
        productive([], first_fault=10.0, end=30.0)


def test_the_trace_loses_a_node_every_half_minute_and_returns_it():
    work = goodput.planned(goodput.parse(["--minutes", "5"]))
    assert work.outages == tuple((float(at), at + 20.0) for at in range(30, 300, 30))
    assert work.lasts_s == 300
    assert Work(**json.loads(work.as_json())).job("x").train.steps == goodput.STEPS
    quick = goodput.planned(goodput.parse(["--quick"]))
    assert 2 * (quick.lasts_s + 40) < 180 and len(quick.outages) == 1


class Cluster:
    """Stands for a local cluster: says what was done to it, and when."""

    def __init__(self) -> None:
        self.nodes, self.began, self.story = ["a", "b", "c"], time.monotonic(), []

    def kill_node(self, node: str) -> None:
        self.nodes.remove(node)
        self.story.append((f"-{node}", time.monotonic() - self.began))

    def add_node(self) -> None:
        self.nodes.append(f"n{len(self.story)}")
        self.story.append((f"+{self.nodes[-1]}", time.monotonic() - self.began))


def test_the_nodes_go_and_come_as_planned(tmp_path):
    cluster: Any = Cluster()
    work = Work(str(tmp_path), outages=((0.1, 0.3), (0.2, 9.0)), lasts_s=0.4)
    assert not fault.over(work)
    fault.endure(work, cluster, lambda: time.sleep(60), lambda: 1)
    assert [name for name, _ in cluster.story] == ["-a", "-b", "+n2"]  # what lies beyond the end does not happen
    assert all(at >= due for (_, at), due in zip(cluster.story, (0.1, 0.2, 0.3), strict=True))
    rows = [json.loads(line) for line in (tmp_path / "faults.jsonl").read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["lost", "lost", "returned", "end"]
    assert fault.over(work)


def test_a_job_that_ends_early_is_no_measurement(tmp_path):
    work = Work(str(tmp_path), outages=((5.0, 6.0),), lasts_s=60.0)
    with pytest.raises(RuntimeError, match="before its time"):
        fault.endure(work, Cluster(), lambda: None, lambda: 1)
    assert not fault.over(work)


def test_figures_of_a_run_come_from_its_logs(tmp_path):
    work = Work(str(tmp_path), outages=((10.0, 15.0),), lasts_s=20.0)
    faults = [{"time": 110.5, "kind": "lost"}, {"time": 120.0, "kind": "end"}]
    (tmp_path / "faults.jsonl").write_text("".join(json.dumps(row) + "\n" for row in faults))
    peer = [{"step": s.number, "time": s.time, "inc": s.incarnation, "world": 3} for s in steps(1, 11, 100.0, "a")]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in peer))
    found = goodput.figures("ray-train", work)
    assert (found["goodput"], found["committed"], found["longest_outage_seconds"]) == (0.5, 10, 10.0)
    run_dir = tmp_path / "bench"
    run_dir.mkdir()
    ours = [{"step": row["step"] - 1, "time": row["time"], "gen": 1} for row in peer]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ours))
    event = {"time": 99.0, "event": "generation", "gen": 1, "workers": ["w0", "w1", "w2"]}
    (run_dir / "events.jsonl").write_text(json.dumps(event) + "\n")
    same = {name: value for name, value in goodput.figures("planaria", work).items() if name != "own_account"}
    assert same == found
    (tmp_path / "faults.jsonl").write_text(json.dumps(faults[0]) + "\n")
    with pytest.raises(ValueError, match="ended early, after 1 lost"):
        goodput.figures("ray-train", work)


def test_the_report_compares_medians_and_names_who_is_absent():
    def row(name: str, share: float, **more: Any) -> dict[str, Any]:
        return {"contender": name, "round": 1, "goodput": share, "committed": 100, "load": 0.5} | more

    account = {"productive": 9.0, "recovery_form": 1.0, "wall": 10.0, "goodput": 0.9}
    rows = [row("planaria", 0.9, own_account=account), row("ray-train", 0.3), row("planaria", 0.8)]
    result = goodput.build_report(rows, goodput.planned(goodput.parse([])), "2026-01-31")
    check({**vars(result), "tables": []})
    assert result.figures == pytest.approx({"goodput": 0.85, "goodput_vs_ray_train": 0.85 / 0.3})
    own = next(table for table in result.tables if "own account" in table.title)
    assert ["recovery", "1", "10.0%", "form 1"] in [list(line) for line in own.rows]
    rows = [rows[0], {"contender": "ray-train", "round": 1, "absent": "ended early"}]
    alone = goodput.build_report(rows, goodput.planned(goodput.parse([])), "2026-01-31")
    assert alone.figures == {"goodput": 0.9}
    assert ["ray-train", "1", "ended early"] in [list(line) for table in alone.tables for line in table.rows]
