"""What the controller makes of an event; without Ray, so of a controller that was not started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from planaria.control.controller import Controller, State
from planaria.control.events import Said
from planaria.control.generation import Generation
from planaria.layout import Layout
from planaria.observe.record import RunRecord
from planaria.planner.plan import Plan


@pytest.fixture
def controller(tmp_path) -> Any:
    found: Any = Controller.__new__(Controller)
    found.record, found.state = RunRecord(tmp_path), State.RESIZING
    found.chronicle = SimpleNamespace(take=lambda ident, message: None)
    return found


@pytest.fixture
def generation() -> Generation:
    plan = Plan(Layout(dp_shard=2), ("worker-0", "worker-1"), (), "")
    return Generation(2, plan, "start", True, 0, pause_asked=True)


def said(kind: str, gen: int = 2) -> Said:
    return Said("worker-0", {"t": kind, "gen": gen, "rank": 0, "step": 5})


def test_a_change_of_size_that_could_not_save_is_tried_again_once_saving_works(controller, generation) -> None:
    controller._take(said("checkpoint_failed"), generation)
    assert (controller.state, generation.pause_asked) == (State.RUNNING, True)
    controller._take(said("checkpoint_failed"), generation)
    assert generation.pause_asked, "no attempt at every step while the disk is full"
    controller._take(said("checkpoint"), generation)
    assert not generation.pause_asked


def test_an_older_checkpoint_says_nothing_about_a_change_of_size_under_way(controller, generation) -> None:
    controller._take(said("checkpoint"), generation)
    controller._take(said("checkpoint_failed", gen=1), generation)
    assert (controller.state, generation.pause_asked) == (State.RESIZING, True)
