"""What the controller makes of an event; without Ray, so of a controller that was not started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from planaria.config import parse
from planaria.control.controller import Controller, State
from planaria.control.custody import Custody
from planaria.control.events import Saved
from planaria.control.generation import Generation
from planaria.control.members import Life, Member
from planaria.control.status import Status
from planaria.layout import Layout
from planaria.observe.record import RunRecord, read_lines
from planaria.planner.plan import Plan

JOB = {"train": {"steps": 10, "global_batch": 2}}


@pytest.fixture
def controller(tmp_path) -> Any:
    found: Any = Controller.__new__(Controller)
    found.record, found.state, found.view = RunRecord(tmp_path), State.RUNNING, Status(total_steps=10)
    found.custody = Custody(parse(JOB), str(tmp_path), found.record, found.view, dict, lambda event: None)
    found.generations = [generation()]
    return found


def generation() -> Generation:
    plan = Plan(Layout(dp_shard=2), ("worker-0", "worker-1"), (), "")
    return Generation(1, plan, "start", True, 0, nodes=("n0", "n1"))


def test_a_checkpoint_that_failed_is_remembered_for_the_end_and_does_not_count_as_durable(controller) -> None:
    controller._take(Saved(1, 5, 0.1), None)
    controller._take(Saved(1, 10, 0.1, "no space"), None)
    assert controller.view.checkpoint_step == 5
    assert controller.generations[0].problems == {10: "no space"}
    assert [event["event"] for event in read_lines(controller.record.path / "events.jsonl")] == [
        "checkpoint",
        "checkpoint_failed",
    ]


@pytest.mark.parametrize(("node", "harmed"), [("n1", True), ("n2", False)])
def test_only_a_keeper_of_a_node_at_work_ends_the_generation(controller, node: str, harmed: bool) -> None:
    member = Member("keeper-7", node, None, Life.READY)
    controller.staff = SimpleNamespace(
        lose=lambda ident, why: True,
        is_keeper=lambda ident: True,
        keepers=SimpleNamespace(get=lambda ident: member),
    )
    controller.beacon = SimpleNamespace(cut=lambda ident: None)
    controller._lose("keeper-7", controller.generations[0], "its process ended")
    assert bool(controller.generations[0].lost) is harmed
