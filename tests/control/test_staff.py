"""Processes that start, fail to start and are replaced; the fleet is a stand-in, for Ray is not what is tested."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from planaria.config import parse
from planaria.control import filling as module
from planaria.control import journal
from planaria.control.events import Started
from planaria.control.failure import JobFailed
from planaria.control.filling import fill
from planaria.control.members import Life
from planaria.control.policies.quarantine import Fault
from planaria.control.staff import Staff
from planaria.data.errors import DataError
from planaria.memory.wire import KeeperAddress
from planaria.observe.record import RunRecord, read_lines
from planaria.runtime.fleet import Fleet
from planaria.runtime.hello import Hello


class Handle:
    """An actor that never answers; the test answers for it."""

    def __getattr__(self, name: str) -> Handle:
        return self

    def __call__(self, *args: Any, **options: Any) -> Handle:
        return self


class StandIn:
    def __init__(self) -> None:
        self.killed = 0

    def start_worker(self, ident: str, node: str) -> Handle:
        return Handle()

    start_loader = start_keeper = start_standby = start_seat = start_worker
    standbys = 0

    def kill(self, handle: Handle) -> None:
        self.killed += 1


@pytest.fixture
def staff(tmp_path) -> Staff:
    job = parse(
        {
            "model": {"preset": "llava-tiny"},
            "train": {"steps": 4, "global_batch": 4},
            "elastic": {"max_workers": 2},
            "data": {"loaders": 2},
        }
    )
    found = Staff(job, cast(Fleet, StandIn()), RunRecord(tmp_path), lambda event: None)
    found.nodes({"a": 1, "b": 1})
    fill(found)
    return found


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("ready", "Traceback\nthe last line", cause)


def test_a_loader_that_does_not_come_up_is_started_again(staff: Staff, monkeypatch) -> None:
    assert len(list(staff.loaders.of(Life.STARTING))) == 2
    monkeypatch.setattr(module, "START_LIMIT_S", -1.0)
    fill(staff)
    assert [member.ident for member in staff.loaders.of(Life.LOST)] == ["loader-0", "loader-1"]


def test_data_that_no_loader_can_open_end_the_job(staff: Staff) -> None:
    with pytest.raises(JobFailed, match=r"cannot be opened.*no such"):
        staff.started(Started("loader-0", error=task_error(DataError("x.tar", "no such file", "mend it"))))


def test_data_that_another_loader_reads_are_the_nodes_own_trouble(staff: Staff) -> None:
    staff.started(Started("loader-0", Hello(1, "a")))
    assert not staff.started(Started("loader-1", error=task_error(DataError("x.tar", "no such file", "mend it"))))
    assert [member.ident for member in staff.loaders.of(Life.LOST)] == ["loader-1"]
    assert len(staff.loader_handles()) == 1


def test_why_a_worker_could_not_start_is_told(staff: Staff, tmp_path) -> None:
    died = ActorDiedError(RayTaskError("__init__", "Traceback\nNo module named 'mine'", ImportError("mine")))
    staff.started(Started("worker-0", error=died))
    assert "No module named 'mine'" in staff.trouble
    assert "No module named 'mine'" in read_lines(tmp_path / "events.jsonl")[-1]["text"]
    staff.started(Started("worker-1", Hello(7, "b")))
    assert staff.trouble == ""


def test_lost_loaders_are_replaced_at_once_while_all_nodes_rest(staff: Staff) -> None:
    for ident in ("loader-0", "loader-1", "worker-0", "worker-1"):
        staff.started(Started(ident, Hello(1, "a" if ident.endswith("0") else "b")))
    for ident in ("loader-0", "loader-1"):
        staff.lose(ident, "its process ended")
    assert {member.node for member in staff.loaders.of(Life.LOST)} == {"a", "b"}
    fill(staff)
    assert [member.ident for member in staff.loaders.of(Life.STARTING)] == ["loader-2", "loader-3"]


def at_work(staff: Staff) -> None:
    """Everybody is ready, and every node has a standby."""
    cast(Any, staff.fleet).standbys = 1
    for ident in ("worker-0", "worker-1", "keeper-0", "keeper-1", "loader-0", "loader-1"):
        node = staff._of(ident).get(ident).node  # type: ignore[union-attr]
        staff.started(Started(ident, Hello(1, node, KeeperAddress(node, "host", 1, ""), gpus=f"gpu of {ident}")))
    for number in (0, 1):
        fill(staff, calm=True)
        (standby,) = staff.standbys.of(Life.STARTING)
        assert standby.ident == f"standby-{number}", "one at a time"
        fill(staff, calm=True)
        staff.started(Started(standby.ident, Hello(1, standby.node)))
    fill(staff, calm=True)
    assert not staff.starting()


def test_a_standby_takes_the_place_of_a_worker_of_its_node(staff: Staff, tmp_path) -> None:
    at_work(staff)
    assert [slot.id for slot in staff.slots()] == ["worker-0", "worker-1"]
    node = staff.workers.get("worker-0").node  # type: ignore[union-attr]
    staff.lose("worker-0", "its process ended")
    fill(staff)
    promoted = next(slot for slot in staff.slots() if slot.id.startswith("standby-"))
    assert promoted.node == node
    member = staff.workers.get(promoted.id)
    assert member is not None
    assert member.gpus == "gpu of worker-0"
    assert not list(staff.workers.of(Life.STARTING)), "no process is started for a place that is taken"
    fill(staff, calm=True)
    (seat,) = staff.seats.of(Life.STARTING)
    assert (seat.ident, seat.node) == (promoted.id.replace("standby", "seat"), node)
    staff.started(Started(seat.ident, Hello(1, node)))
    staff.ground.trust.proved(node)  # its rest is over
    fill(staff, calm=True)
    assert staff.starting() == ["standby-2"], "the node gets another standby"
    staff.lose(promoted.id, "its process ended")
    assert seat.life is Life.LOST


def test_without_a_standby_of_the_node_a_process_is_started(staff: Staff) -> None:
    at_work(staff)
    node = staff.workers.get("worker-0").node  # type: ignore[union-attr]
    for standby in list(staff.standbys.of(Life.READY)):
        if standby.node == node:
            staff.lose(standby.ident, "its process ended")
    staff.lose("worker-0", "its process ended")
    staff.ground.trust.proved(node)
    fill(staff)
    assert [slot.id for slot in staff.slots()] == ["worker-1"]
    assert staff.starting() == ["worker-2"]


def test_who_is_dismissed_is_no_stain_on_its_node_and_a_leaving_node_gets_nobody(staff: Staff) -> None:
    at_work(staff)
    node = staff.workers.get("worker-0").node  # type: ignore[union-attr]
    staff.ground.notices({node: None})
    assert [slot.id for slot in staff.slots()] == ["worker-1"]
    for member in staff.on_nodes([node]):
        staff.dismiss(member.ident, "its node leaves")
    assert not staff.ground.trust.suspects()
    fill(staff)
    assert all(member.node != node for kind in staff.kinds for member in kind.of(Life.STARTING))


def test_a_loader_under_notice_stays_until_another_one_is_ready(staff: Staff) -> None:
    at_work(staff)
    nodes = {member.ident: member.node for member in staff.loaders.of(Life.READY)}
    assert len(set(nodes.values())) == 2
    staff.ground.notices({nodes["loader-0"]: None, nodes["loader-1"]: None})
    assert not staff.dispensable("loader-0")
    staff.nodes({**staff.ground.capacity, "c": 1})
    fill(staff)
    fresh = [member for member in staff.loaders.of(Life.STARTING)]
    assert {member.node for member in fresh} == {"c"}
    assert not staff.dispensable("loader-0"), "it is not ready yet"
    staff.started(Started(fresh[0].ident, Hello(1, "c")))
    assert staff.dispensable("loader-0")


def test_a_machine_in_quarantine_is_recognised_under_another_name_and_after_a_return(staff: Staff, tmp_path) -> None:
    hosts = {"a": "10.0.0.1", "b": "10.0.0.2", "head": "10.0.0.9"}
    staff.nodes({"a": 1, "b": 1}, hosts)
    staff.nodes({"a": 1, "b": 1, "c": 1}, hosts | {"c": "10.0.0.3"})
    staff.ground.blame("a", Fault.HANG, "worker-0 stood still")
    rows = [row for row in read_lines(tmp_path / "journal.jsonl") if row["t"] == "quarantined"]
    assert [(row["node"], row["times"], row["reason"]) for row in rows] == [("a", 1, "worker-0 stood still")]

    hosts = {"a2": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3", "head": "10.0.0.9"}
    staff.nodes({"a2": 1, "b": 1, "c": 1}, hosts)
    assert [event["node"] for event in read_lines(tmp_path / "events.jsonl") if event["event"] == "recognised"] == [
        "a2"
    ]
    staff.ground.notices({})
    assert set(staff.ground.leaving) == {"a2"}
    (row,) = staff.ground.trust.listing(time.monotonic())
    assert (row["node"], row["quarantined"], row["times"]) == ("a2", True, 1)

    run = journal.run_row("r", 0.0, {})
    past = journal.read([run, *rows], "r")
    assert past is not None
    again = Staff(staff.job, cast(Fleet, StandIn()), RunRecord(tmp_path / "again"), lambda event: None)
    again.adopt(past, cast(Any, None))
    assert set(again.ground.leaving) == {"a"}
    (kept,) = again.ground.trust.listing(time.monotonic())
    assert kept["quarantined"]
    assert kept["seconds_left"] == pytest.approx(row["seconds_left"], abs=1.0)


def test_several_nodes_at_one_address_are_no_machine(staff: Staff) -> None:
    staff.nodes({"a": 1, "b": 1, "c": 1}, dict.fromkeys(("head", "a", "b", "c"), "127.0.0.1"))
    staff.ground.blame("a", Fault.HANG, "worker-0 stood still")
    staff.nodes({"b": 1, "c": 1, "d": 1}, dict.fromkeys(("head", "b", "c", "d"), "127.0.0.1"))
    assert not staff.ground.trust.held("d", time.monotonic())
