"""Numerical faults: patience, and one way back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.control.policies.decisions import GiveUp
from planaria.control.policies.numerics import Proceed, RollBack, judge_steps


def test_single_skips_are_nothing():
    assert judge_steps([], 10, 3, [0]) == Proceed(0)
    assert judge_steps([2, 4, 6, 8], 9, 3, [0]) == Proceed(1)
    assert judge_steps([7, 8], 9, 3, [0]) == Proceed(2)
    assert judge_steps([5, 6, 7], 9, 3, [0]) == Proceed(0)


def test_too_many_in_a_row_go_back_before_the_first_and_leave_their_data_out():
    assert judge_steps([3, 6, 7, 8], 9, 3, [0, 5, 6, 7, 8]) == RollBack(6, 6, 8)
    assert judge_steps([6, 7, 8], 9, 3, [0, 5]) == RollBack(5, 6, 8)
    assert judge_steps([0], 1, 1, [0]) == RollBack(0, 0, 0)


def test_with_nothing_to_go_back_to_it_gives_up():
    decision = judge_steps([0, 1, 2], 3, 3, [1, 2])
    assert isinstance(decision, GiveUp)
    assert "gradients of steps 0 to 2 were not finite, and there is no state from before them" in decision.reason
    assert "gradients of step 0 were" in judge_steps([0], 1, 1, []).reason


def test_the_same_state_a_second_time_gives_up():
    before = [RollBack(5, 6, 8)]
    decision = judge_steps([7, 8, 9], 10, 3, [0, 5], before)
    assert isinstance(decision, GiveUp)
    assert "although the job had gone back to step 5 before and left out the data of steps 6 to 8" in decision.reason
    assert judge_steps([57, 58, 59], 60, 3, [5, 50], before) == RollBack(50, 57, 59)


def test_the_limit_must_be_one():
    with pytest.raises(ValueError, match="limit=0"):
        judge_steps([], 1, 0, [])


@given(st.sets(st.integers(0, 30)), st.integers(0, 31), st.integers(1, 5), st.sets(st.integers(0, 31)))
def test_rolls_back_exactly_over_the_skipped_run(skipped, done, limit, states):
    skipped = {step for step in skipped if step < done}
    decision = judge_steps(skipped, done, limit, states)
    if isinstance(decision, Proceed):
        assert decision.in_a_row < limit
        assert set(range(done - decision.in_a_row, done)) <= skipped
        assert done - decision.in_a_row - 1 not in skipped
    elif isinstance(decision, RollBack):
        assert decision.last == done - 1
        assert set(range(decision.first, done)) <= skipped
        assert decision.to_step in states and decision.to_step <= decision.first
        assert isinstance(judge_steps(skipped, done, limit, states, [decision]), GiveUp)
    else:
        assert not any(state <= done - limit and state <= min(skipped) for state in states)


def test_a_job_rolls_back_no_more_often_than_it_has_states():
    states, before = [0, 10, 20], []
    for _ in range(10):
        decision = judge_steps(range(30), 30, 3, states, before)
        if isinstance(decision, GiveUp):
            break
        before.append(decision)
    assert len(before) == 1
