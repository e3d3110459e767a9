"""What the controller makes of an event; without Ray, so without a controller."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from planaria.config import parse
from planaria.control.custody import Custody
from planaria.control.events import Said, Saved
from planaria.control.generation import Generation
from planaria.control.hearing import take
from planaria.control.losses import lose
from planaria.control.members import Life, Member
from planaria.control.status import Status
from planaria.layout import Layout
from planaria.observe.record import RunRecord, read_lines
from planaria.planner.plan import Plan

JOB = {"train": {"steps": 10, "global_batch": 2}}


@pytest.fixture
def desk(tmp_path) -> Any:
    record, view = RunRecord(tmp_path), Status(total_steps=10)
    custody = Custody(parse(JOB), str(tmp_path), record, view, dict, lambda event: None)
    return SimpleNamespace(record=record, view=view, custody=custody, generations=[generation()])


def generation() -> Generation:
    plan = Plan(Layout(dp_shard=2), ("worker-0", "worker-1"), (), "")
    return Generation(1, plan, "start", True, 0, nodes=("n0", "n1"))


def test_a_checkpoint_that_failed_is_remembered_for_the_end_and_does_not_count_as_durable(desk) -> None:
    take(desk, Saved(1, 5, 0.1), None)
    take(desk, Saved(1, 10, 0.1, "no space"), None)
    assert desk.view.checkpoint_step == 5
    assert desk.generations[0].problems == {10: "no space"}
    assert [event["event"] for event in read_lines(desk.record.path / "events.jsonl")] == [
        "checkpoint",
        "checkpoint_failed",
    ]


@pytest.mark.parametrize(("node", "harmed"), [("n1", True), ("n2", False)])
def test_only_a_keeper_of_a_node_at_work_ends_the_generation(desk, node: str, harmed: bool) -> None:
    member = Member("keeper-7", node, None, Life.READY)
    desk.staff = SimpleNamespace(
        lose=lambda ident, why: True,
        is_keeper=lambda ident: True,
        keepers=SimpleNamespace(get=lambda ident: member),
    )
    desk.beacon = SimpleNamespace(cut=lambda ident: None)
    lose(desk, "keeper-7", desk.generations[0], "its process ended")
    assert bool(desk.generations[0].lost) is harmed


@pytest.mark.parametrize(("life", "heard"), [(Life.STARTING, True), (Life.READY, True), (Life.LOST, False)])
def test_what_a_keeper_says_before_its_answer_to_a_returned_controller_counts(desk, life: Life, heard: bool) -> None:
    member, words = Member("keeper-0", "n0", None, life), []
    desk.staff = SimpleNamespace(is_keeper=lambda ident: True, keepers=SimpleNamespace(get=lambda ident: member))
    desk.custody = SimpleNamespace(keeper_said=lambda node, message: words.append((node, message["t"])))
    take(desk, Said("keeper-0", {"t": "drained"}), desk.generations[0])
    assert words == ([("n0", "drained")] if heard else [])
