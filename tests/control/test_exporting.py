"""What a scrape sees of the state of a job, and that metrics can fail without the job."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from planaria.config import parse
from planaria.control.exporting import Exporter, live
from planaria.control.generation import Generation
from planaria.control.members import Life, Member, Members
from planaria.control.policies.states import State
from planaria.control.status import Status
from planaria.layout import Layout
from planaria.metrics.server import MetricsServer
from planaria.observe.goodput import CLASSES, Account
from planaria.observe.record import RunRecord
from planaria.planner.plan import Plan

NODES = ("aaaaaaaa-1", "bbbbbbbb-2")


@pytest.fixture
def desk(tmp_path: Path) -> Any:
    workers, loaders = Members("worker"), Members("loader")
    for number, node in enumerate((*NODES, NODES[0])):
        workers.add(Member(f"worker-{number}", node, None, Life.READY))
    generation = Generation(1, Plan(Layout(dp_shard=2), ("worker-0", "worker-1"), ("worker-2",), ""), "start", True, 0)
    generation.nodes = NODES
    for rank in range(2):
        generation.reports[rank] = {"step": 4, "step_s": 0.5, "data_wait_s": 0.1, "compute_s": None, "rss_bytes": 7.0}
    trust = SimpleNamespace(held=lambda node, now: node == "cccccccc-3")
    ground = SimpleNamespace(capacity={node: 1 for node in (*NODES, "cccccccc-3")}, leaving={NODES[1]: 0}, trust=trust)
    metrics = {"port": 0, "host": "127.0.0.1", "ray_mirror": False}
    return SimpleNamespace(
        job=parse({"model": {"preset": "llava-tiny"}, "train": {"steps": 9, "global_batch": 2}, "metrics": metrics}),
        host="127.0.0.1",
        record=RunRecord(tmp_path),
        view=Status(9, memory={NODES[0]: 64}, energy={NODES[0]: {"intel-rapl:0": 2.5}}),
        staff=SimpleNamespace(workers=workers, loaders=loaders, ground=ground),
        chronicle=SimpleNamespace(account=Account(time.monotonic())),
        state=State.RUNNING,
        last=generation,
    )


def test_the_series_of_a_rank_end_with_it(desk: Any) -> None:
    def ranks() -> set[tuple[str, ...]]:
        return set(live(desk, 0.0, 0.0).get("planaria_rank_step_seconds", {}))

    assert ranks() == {("0", "aaaaaaaa"), ("1", "bbbbbbbb")}
    desk.last.lost["worker-1"] = "its process ended"
    assert ranks() == {("0", "aaaaaaaa")}
    desk.last = Generation(2, desk.last.plan, "fault", False, 4)
    assert ranks() == set()


def test_states_are_counted(desk: Any) -> None:
    values = live(desk, saved_at=time.time() - 30.0, began=0.0)
    assert values["planaria_workers"] == {("starting",): 0, ("training",): 2, ("spare",): 1}
    assert values["planaria_nodes"] == {("staying",): 1, ("leaving",): 1, ("quarantined",): 1}
    assert [at for at, value in values["planaria_state"].items() if value] == [("running",)]
    assert values["planaria_layout_degree"]["dp_shard",] == 2
    assert {at[0] for at in values["planaria_goodput_seconds"]} == set(CLASSES)
    assert values["planaria_checkpoint_age_seconds"][()] == pytest.approx(30.0, abs=5.0)
    assert values["planaria_rank_memory_bytes"]["0", "aaaaaaaa", "resident"] == 7
    assert values["planaria_node_energy_joules_total"] == {("aaaaaaaa", "intel-rapl:0"): 2.5}
    assert "planaria_rank_compute_seconds" not in values, "it was not measured"
    desk.state = State.FAILED
    assert live(desk, 0.0, 0.0)["planaria_run_active"][()] == 0


def test_records_are_counted_as_they_are_written_and_again_after_a_return(desk: Any) -> None:
    desk.record.event("hang", "of an earlier submission")
    sizes = desk.record.sizes()
    exporter = Exporter(desk)
    desk.record.event("hang", "nobody gets ahead")
    assert exporter.read()["planaria_hangs_total"][()] == 1
    returned = Exporter(desk)
    returned.begin(0.0, sizes)
    desk.record.event("hang", "again")
    assert returned.read()["planaria_hangs_total"][()] == 2
    returned.close()


def test_a_row_that_cannot_be_counted_stops_nothing(desk: Any) -> None:
    exporter = Exporter(desk)
    desk.record.event("checkpoint", "without its duration")
    desk.record.event("hang", "counted all the same")
    assert exporter.read()["planaria_hangs_total"][()] == 1


def test_a_run_goes_on_without_metrics_where_no_port_can_be_had(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> MetricsServer:
        raise OSError("address not available")

    monkeypatch.setattr("planaria.control.exporting.MetricsServer", refuse)
    Exporter(desk).begin(0.0, None)
    assert [row["problem"] for row in desk.record.rows("events")] == ["address not available"]
