"""The state machine: the table is sound, and it is the one that the documentation draws."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from planaria.control.policies.states import FINAL, INITIAL, TRANSITIONS, IllegalTransition, State, check, mermaid

PAGE = Path(__file__).resolve().parents[3] / "docs/architecture.md"


def test_the_diagram_shows_the_table():
    drawn = re.search(r"```mermaid\nstateDiagram-v2\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert drawn is not None
    assert sorted(line.strip() for line in drawn[1].splitlines() if line.strip()) == sorted(mermaid())


def test_only_what_the_table_holds_is_legal():
    for before, after in itertools.product(State, State):
        if before is after or (before, after) in TRANSITIONS:
            check(before, after)
        else:
            with pytest.raises(IllegalTransition, match=f"{before.value} to {after.value} is no transition"):
                check(before, after)


def test_the_message_says_what_is_possible():
    with pytest.raises(IllegalTransition, match="from stopping: stopped, finished, recovering, failed"):
        check(State.STOPPING, State.FORMING)
    with pytest.raises(IllegalTransition, match="from finished: none"):
        check(State.FINISHED, State.FORMING)


def test_every_state_is_reached_and_every_job_can_end():
    reached = {INITIAL}
    while more := {after for before, after in TRANSITIONS if before in reached} - reached:
        reached |= more
    assert reached == set(State)
    assert not any(before in FINAL for before, _ in TRANSITIONS)
    for state in set(State) - FINAL:
        assert (state, State.FAILED) in TRANSITIONS


def test_running_is_only_left_through_a_state_that_says_why():
    assert {after for before, after in TRANSITIONS if before is State.RUNNING} == {
        State.RECOVERING,
        State.RESIZING,
        State.DRAINING,
        State.STOPPING,
        State.FINISHED,
        State.FAILED,
    }
