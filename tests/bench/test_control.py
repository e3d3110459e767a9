"""The benchmark of control: traces are reproducible, a small fleet comes through all of them, figures are right."""

from __future__ import annotations

from collections import Counter

import pytest

import control
from _control.fleet import STEP_S, Fleet, job
from _control.replay import percentile, replay, summary
from _control.traces import NOTICE_S, Fault, trace
from _report import Report, check


@pytest.mark.parametrize("name", control.TRACES)
def test_a_trace_is_a_function_of_its_seed(name):
    one, same, other = (trace(name, 100, 60, 900.0, seed) for seed in (1, 1, 2))
    assert one == same != other
    assert all(0 <= fault.at < 900 and 0 <= fault.machine < 100 for fault in one)
    assert [fault.at for fault in one] == sorted(fault.at for fault in one)


def test_a_notice_is_followed_by_the_loss():
    events = trace("spot", 100, 60, 10_000.0, 1)
    lost = {(fault.machine, fault.at) for fault in events if fault.kind == "lost"}
    notices = [fault for fault in events if fault.kind == "notice" and fault.at + NOTICE_S < 10_000]
    assert notices
    assert all((fault.machine, fault.at + NOTICE_S) in lost for fault in notices)


def check_fleet(fleet: Fleet) -> None:
    ranks = fleet._ranks()
    assert ranks or fleet.waiting
    nodes = [fleet._node(ident) for ident in ranks]
    assert set(nodes) <= set(fleet.capacity)
    assert not any(fleet.trust.held(node, fleet.now) for node in nodes)
    assert {word.member for word in fleet.words.values()} == set(ranks)
    assert max(Counter(slot.node for slot in fleet.workers.slots()).values(), default=0) <= fleet.per_machine


@pytest.mark.parametrize("name", control.TRACES)
def test_after_every_fault_the_job_is_laid_out_over_what_is_there(name):
    fleet = Fleet(12, 8, seed=3)
    for fault in trace(name, 12, 40, 900.0, 3):
        while fleet.now + STEP_S < fault.at:
            fleet.tick()
            check_fleet(fleet)
        fleet.take(fault)
        check_fleet(fleet)
    assert fleet.history


def test_every_kind_of_fault_meets_its_policy():
    fleet = Fleet(6, 8, seed=1)

    def after(kind: str, machine: int, ticks: int) -> dict[str, int]:
        before = Counter(fleet.counts)
        fleet.take(Fault(fleet.now + 1, kind, machine))
        for _ in range(ticks):
            fleet.tick()
        return dict(Counter(fleet.counts) - before)

    for _ in range(3):
        fleet.tick()
    assert after("crash", 0, 1) == {"crash": 1}
    assert fleet.plan is not None and "standby-1" in fleet.plan.ranks
    assert after("stuck", 1, 12) == {"stuck": 1, "hang": 1, "quarantine": 1}
    assert after("wrong", 2, 1) == {"wrong": 1, "quarantine": 1}
    assert after("slow", 3, 12) == {"slow": 1, "straggler": 8}
    gone = fleet.nodes[4]
    assert after("notice", 4, 1) == {"notice": 1} and gone not in fleet.capacity
    assert after("lost", 5, 1) == {"lost": 1}
    assert len(fleet.plan.ranks) == 32  # two machines of six are gone; those in quarantine have served their time
    assert fleet.plan.layout.tp == 8
    assert after("back", 5, 20) == {} and len(fleet.plan.ranks) == 40


def test_a_fleet_that_is_gone_waits_and_goes_on():
    fleet = Fleet(3, 8, seed=1)
    for machine in range(3):
        fleet.take(Fault(1.0 + machine, "lost", machine))
        fleet.tick()
    assert fleet.waiting and not fleet.words
    fleet.take(Fault(60, "back", 1))
    assert not fleet.waiting and len(fleet.words) == 8


def test_percentiles_by_nearest_rank():
    values = [float(value) for value in range(1, 201)]
    assert (percentile(values, 0.99), percentile([7.0], 0.99)) == (198.0, 7.0)
    assert summary([0.003, 0.001, 0.002]) == {"count": 3, "p50": 2.0, "p99": 3.0, "max": 3.0}


def test_rows_hold_what_the_report_shows():
    row = replay("random", 6, 8, 10, 120.0, 1)
    assert row["rounds"] == row["faults"] + 120 / STEP_S == row["ms"]["decision"]["count"]
    assert row["books"]["generations"] > 1 and row["events_per_s"] > 0
    assert row["ms"]["hang"]["max"] <= row["ms"]["decision"]["max"]


def test_the_whole_benchmark_on_a_small_fleet(tmp_path):
    file = tmp_path / "control.json"
    code = control.main(["--quick", "--machines", "8", "--seconds", "100", "--json", str(file)])
    report = Report.read(file)
    check(vars(report) | {"tables": []})
    assert set(report.figures) == {"decision_ms_p99", "replan_ms_p99", "events_per_s", "memory_mib"}
    assert all(value > 0 for value in report.figures.values())
    assert code == int(max(report.figures["decision_ms_p99"], report.figures["replan_ms_p99"]) >= control.LIMIT_MS)
    assert [row["trace"] for row in report.rows] == [*control.TRACES, "memory"]


def test_figures_are_those_of_the_slower_trace():
    def row(name: str, decision: float, replan: float, rate: float) -> dict:
        ms = {key: summary([value / 1e3]) for key, value in (("decision", decision), ("replan", replan))}
        return {"trace": name, "ms": ms, "events_per_s": rate, "books": {"generations": 3}}

    rows = [row("random", 10, 50, 900), row("spot", 20, 40, 800), row("random", 12, 60, 700), row("spot", 30, 40, 600)]
    rows.append({"trace": "memory", "faults": 5, "start_mib": 1.0, "end_mib": 2.0, "peak_mib": 3.0})
    report = control.build_report(rows, control.parse([]), "2026-01-01")
    assert report.figures == pytest.approx(
        {"decision_ms_p99": 25, "replan_ms_p99": 55, "events_per_s": 700, "memory_mib": 2.0}
    )


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--machines", "0"], ["--seconds", "1"]])
def test_nonsense_is_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        control.parse(arguments)
    assert "must be at least 1" in capsys.readouterr().err


def test_the_job_is_one_that_the_fleet_can_run():
    assert job(80).elastic.min_workers == 8
