"""Planned leave: one move where deadlines allow, before every deadline, never below the minimum."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.config import ElasticConfig
from planaria.control.policies.decisions import Pause
from planaria.control.policies.drain import GATHER_S, MARGIN_S, SLOW_STEP, Leave, Notice, Stay, drain

RUNNING = {"a": ("w0", "w1"), "b": ("w2", "w3"), "c": ("w4", "w5")}
STEP = [1.0, 0.8]
AMPLE = SLOW_STEP * 1.0 + MARGIN_S


def limits(low: int = 1, high: int = 100) -> ElasticConfig:
    return ElasticConfig(min_workers=low, max_workers=high)


def ask(notices, now, low=1, spares=None, step_s=STEP, running=RUNNING, save_s=0.0, high=100):
    return drain(notices, running, spares or {}, step_s, now, limits(low, high), save_s)


def test_nothing_is_pending():
    assert ask({}, 5) == Stay()
    assert ask({"elsewhere": Notice(10)}, 5) == Stay()
    assert ask({"a": Notice(10)}, 5, running={"a": ()}) == Stay()


def test_notices_are_gathered_and_obeyed_in_one_move():
    first = {"a": Notice(60, "preempted", since=10)}
    assert ask(first, 10) == Stay(10 + GATHER_S)
    both = first | {"b": Notice(90, "preempted", since=11)}
    assert ask(both, 11.9) == Stay(12)
    assert ask(both, 12) == Leave(("a", "b"), ("w0", "w1", "w2", "w3"), 2, "2 node(s) told to end (preempted)")


def test_a_near_deadline_cuts_the_gathering_short():
    near = {"a": Notice(10.5 + AMPLE, since=10)}
    assert ask(near, 10) == Stay(10.5)
    assert ask(near, 10.5) == Leave(("a",), ("w0", "w1"), 4, "1 node(s) told to end")


def test_a_deadline_nearer_than_a_step_means_at_once_and_says_that_it_may_be_late():
    decision = ask({"a": Notice(10.9, since=10), "b": Notice(60, since=10)}, 10)
    assert isinstance(decision, Leave)
    assert (decision.nodes, decision.late) == (("a", "b"), ("a",))


def test_without_a_deadline_it_leaves_after_gathering():
    assert ask({"a": Notice(None, since=10)}, 11) == Stay(12)
    assert isinstance(ask({"a": Notice(None, since=10)}, 12), Leave)


def test_before_the_first_step_it_leaves_at_once():
    assert isinstance(ask({"a": Notice(1000, since=10)}, 10, step_s=[]), Leave)


def test_spares_step_in_but_not_those_under_notice():
    notices = {"a": Notice(60, since=0), "d": Notice(60, since=0)}
    spares = {"d": ["s0"], "e": ["s1"]}
    left = ask(notices, 10, spares=spares)
    assert isinstance(left, Leave)
    assert (left.nodes, left.left) == (("a",), 5)
    assert ask(notices, 10, spares=spares, high=4).left == 4
    assert ask(notices, 58, low=6, spares=spares) == Pause(5, ("a",), ("w0", "w1"))


def test_too_few_left_trains_to_the_end_and_then_pauses():
    notices = {node: Notice(60, since=0) for node in "abc"}
    assert ask(notices, 30, low=2) == Stay(60 - AMPLE)
    assert ask(notices, 60 - AMPLE, low=2) == Pause(0, ("a", "b", "c"), ("w0", "w1", "w2", "w3", "w4", "w5"))
    assert ask(notices, 30, low=2, save_s=20) == Stay(60 - AMPLE - 20)
    assert isinstance(ask(notices, 60 - AMPLE - 20, low=2, save_s=20), Pause)


def test_the_urgent_leave_first_where_all_together_would_be_too_many():
    notices = {"a": Notice(60, since=0), "b": Notice(900, since=0)}
    assert ask(notices, 30, low=4) == Stay(60 - AMPLE)
    decision = ask(notices, 60 - AMPLE, low=4)
    assert isinstance(decision, Leave)
    assert decision.nodes == ("a",)
    assert "1 more stay until their deadline" in decision.why
    rest = {node: members for node, members in RUNNING.items() if node != "a"}
    assert ask(notices, 100, low=4, running=rest) == Stay(900 - AMPLE)
    assert ask(notices, 900 - AMPLE, low=4, running=rest) == Pause(2, ("b",), ("w2", "w3"))


@pytest.mark.parametrize("low", [1, 3, 6])
@given(
    notices=st.lists(
        st.tuples(st.sampled_from("abcdef"), st.floats(0, 40), st.none() | st.floats(0, 30)), min_size=1, max_size=8
    ),
    steps=st.lists(st.floats(0.1, 3), min_size=1, max_size=8),
)
def test_no_node_is_used_past_its_deadline_if_a_boundary_came_before_it(low, notices, steps):
    """Steps of varying length, notices at any time; asked every tick, and carried out at the next boundary."""
    running = {node: (f"{node}0", f"{node}1") for node in "abcdef"}
    config, tick, longest = limits(low), 0.1, max(steps)
    known: dict[str, Notice] = {}
    asked: tuple[str, ...] = ()
    boundary, index, previous = 0.0, 0, 0.0
    for count in range(800):
        now = count * tick
        if now >= boundary:
            for node in asked:
                deadline = known[node].deadline
                # Late only if no boundary lay between notice and deadline.
                assert deadline is None or now <= deadline + tick or previous < known[node].since + tick
                running.pop(node, None)
            asked, previous = (), now
            boundary, index = now + steps[index % len(steps)], index + 1
        for node, at, span in notices:
            if at <= now and node not in known:
                known[node] = Notice(None if span is None else at + span, since=now)
        decision = drain(known, running, {}, [longest], now, config)
        if isinstance(decision, Stay):
            assert decision.until is None or decision.until > now
            for node in set(known) & set(running):  # whatever waits can wait for a whole step more
                deadline = known[node].deadline
                assert deadline is None or deadline > now + longest
        else:
            asked = tuple(dict.fromkeys((*asked, *decision.nodes)))
            left = sum(map(len, running.values())) - len(decision.members)
            assert isinstance(decision, Pause) == (left < low)
            if isinstance(decision, Pause):
                break
