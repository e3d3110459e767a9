"""The account of wall time: no gap, nothing twice, and every span in the class that it belongs to."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.observe.goodput import CLASSES, Account

SECONDS = st.floats(0, 30)
STEPS = st.tuples(st.just("step"), st.integers(0, 3), SECONDS, SECONDS, SECONDS, st.booleans())
EVENTS = st.one_of(
    STEPS,
    st.tuples(
        st.just("enter"),
        st.sampled_from(["waiting", "forming", "running", "recovering", "resizing", "stopping", "unheard of"]),
    ),
    st.tuples(st.just("fault"), st.none() | SECONDS),
    st.tuples(st.just("begin"), st.integers(0, 40)),
    st.tuples(st.just("ready"), st.dictionaries(st.sampled_from(["form", "build", "restore"]), SECONDS)),
    st.tuples(st.just("evaluation"), st.booleans()),
    st.tuples(st.just("rollback"), st.integers(0, 40)),
    st.tuples(st.just("enter"), st.sampled_from(["finished", "stopped", "failed"])),
)


def apply(account: Account, event: tuple[Any, ...], now: float, expected_step: int) -> int:
    """One event; returns the step that is expected next."""
    match event:
        case ("enter", state):
            account.enter(state, now)
        case ("fault", before):
            account.fault(now, None if before is None else now - before)
        case ("begin", step):
            account.begin(step, now)
            return step
        case ("ready", phases):
            account.ready(phases)
        case ("step", ahead, step_s, data_s, snapshot_s, counts):
            account.step(expected_step + ahead, step_s, data_s, snapshot_s, now, counts=counts)
            return expected_step + ahead + 1
        case ("evaluation", running):
            account.evaluation(running, now)
        case ("rollback", step):
            account.rollback(step)
    return expected_step


@settings(max_examples=400, deadline=None)
@given(st.floats(0, 1e7), st.lists(st.tuples(st.floats(0, 40), st.floats(0, 2), EVENTS, st.floats(0, 50)), max_size=40))
def test_the_classes_add_up_to_the_elapsed_time_whatever_happens(start, story):
    account, now, expected = Account(start), start, 0
    frozen: float | None = None
    for after, early, event, peek in story:
        now += after
        # Told with a time that may lie before the latest: several threads read the clock before they get the lock.
        expected = apply(account, event, now - early, expected)
        if frozen is None and event[1:] in [("finished",), ("stopped",), ("failed",)]:
            frozen = account.view(now)["wall"]
            assert now - early - start - 1e-6 <= frozen <= now - start + 1e-6
        for moment in (now, now + peek):
            seen = account.view(moment)
            assert set(seen) == {*CLASSES, "wall", "goodput"}
            elapsed = moment - start if frozen is None else frozen
            assert sum(seen[name] for name in CLASSES) == pytest.approx(elapsed, abs=1e-6)
            assert seen["wall"] == pytest.approx(elapsed, abs=1e-6)
            assert all(seen[name] >= 0 for name in CLASSES)
            assert 0 <= seen["goodput"] <= 1


def spent(account: Account, now: float) -> dict[str, float]:
    """Classes that are not empty, without wall and goodput."""
    return {name: round(value, 6) for name, value in account.view(now).items() if name in CLASSES and value > 1e-9}


def begun(step: int = 0) -> Account:
    """A job that started in 10 s, whose first step took 1 s more."""
    account = Account(100.0)
    account.enter("forming", 105.0)
    account.begin(step, 106.0)
    account.ready({"form": 1.0, "build": 1.0, "restore": 1.0})
    account.step(step, 1.0, 0.0, 0.0, 111.0)
    return account


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0, 2), st.floats(0, 2), st.floats(0, 2)), min_size=2, max_size=9))
def test_reports_that_jitter_leave_no_gap_and_count_nothing_twice(reports):
    account, now, told = begun(), 111.0, 1.0
    for step, (span, step_s, data_s, snapshot_s) in enumerate(reports, 1):
        now, told = now + span, told + step_s
        account.step(step, step_s, data_s, snapshot_s, now)
        seen = account.view(now)
        assert sum(seen[name] for name in CLASSES) == pytest.approx(now - 100.0, abs=1e-6)
        assert all(seen[name] >= 0 for name in CLASSES)
        assert seen["productive"] + seen["data_wait"] + seen["checkpoint"] <= told + 1e-6
        assert seen["startup"] == pytest.approx(10)


def test_a_step_is_divided_as_its_worker_says():
    account = begun()
    account.step(1, 2.0, 0.5, 0.25, 113.1)
    assert spent(account, 113.1) == {
        "startup": 10,
        "productive": 2.25,
        "data_wait": 0.5,
        "checkpoint": 0.25,
        "other": 0.1,
    }
    assert account.view(113.1)["goodput"] == pytest.approx(2.25 / 13.1)
    assert spent(account, 114.1)["under_way"] == 1.0


def test_a_late_report_takes_nothing_from_the_next_step():
    account = begun()
    account.step(1, 1.0, 0.0, 0.0, 112.4)  # 0.4 s late
    account.step(2, 1.0, 0.0, 0.0, 113.0)
    assert spent(account, 113.0) == {"startup": 10, "productive": 3}


def test_durations_longer_than_the_wall_are_cut_in_proportion():
    account = begun()
    account.step(1, 4.0, 2.0, 1.0, 113.0)
    assert spent(account, 113.0) == {"startup": 10, "productive": 1.5, "data_wait": 1.0, "checkpoint": 0.5}


def test_recovery_is_told_by_phase_and_the_undone_steps_are_lost():
    account = begun()
    for step in range(1, 6):
        account.step(step, 1.0, 0.0, 0.0, 111.0 + step)
    account.fault(120.0, since=116.5)  # half a step was done when the member fell silent
    account.enter("recovering", 120.0)
    account.enter("forming", 120.25)
    account.begin(4, 120.3)  # steps 4 and 5 are redone
    assert spent(account, 120.8)["recovery_form"] == 0.5
    account.ready({"form": 0.1, "build": 0.2, "restore": 0.4})
    account.step(4, 3.0, 1.5, 0.0, 125.3)
    assert spent(account, 125.3) == {
        "startup": 10,
        "productive": 4 + 1,  # the first step here took 0.5 s longer than usual
        "lost": 2 + 0.5,
        "recovery_detect": 3.5,
        "recovery_abort": 0.25,
        "recovery_plan": 0.05,
        "recovery_form": 0.1,
        "recovery_build": 0.2,
        "recovery_restore": 0.4,
        "recovery_first_step": 5.0 - 0.7 - 1.0,
    }


def test_a_step_that_ended_before_the_fault_but_is_told_after_it_counts():
    account = begun()
    account.fault(112.5)
    account.step(1, 1.0, 0.25, 0.0, 112.6)
    account.enter("forming", 113.0)
    account.begin(2, 113.0)  # the survivors hold it
    assert spent(account, 113.0) == {"startup": 10, "productive": 1.75, "lost": 0.75, "recovery_abort": 0.5}


def test_a_fault_while_a_recovery_is_under_way_leaves_each_its_part():
    account = begun()
    account.enter("recovering", 111.5)
    account.enter("forming", 111.6)
    account.begin(1, 111.7)
    account.ready({"form": 0.1, "build": 0.1, "restore": 0.1})
    account.fault(114.0, since=113.0)
    account.enter("waiting", 114.5)
    account.enter("forming", 120.0)
    account.begin(1, 120.1)
    assert spent(account, 120.1) == {
        "startup": 10,
        "productive": 1,
        "lost": 0.5,
        "recovery_abort": 0.6,
        "recovery_plan": 0.2,
        "recovery_form": 0.1,
        "recovery_build": 0.1,
        "recovery_restore": 0.1,
        "recovery_first_step": 1.0,
        "recovery_detect": 1.0,
        "waiting": 5.5,
    }


def test_a_planned_change_of_size_is_no_recovery_and_loses_nothing():
    account = begun()
    account.enter("resizing", 111.2)
    account.step(1, 1.0, 0.0, 0.0, 112.0)  # the boundary at which all paused
    account.enter("forming", 112.3)
    account.begin(2, 112.4)
    account.ready({"form": 0.2})
    account.step(2, 1.0, 0.0, 0.0, 114.4)
    assert spent(account, 114.4) == {"startup": 10, "productive": 3, "resize": 1.4}


def test_nodes_that_leave_as_announced_cost_no_recovery():
    account = begun()
    account.enter("draining", 111.0)
    account.enter("forming", 111.5)
    account.begin(1, 111.5)
    account.step(1, 1.0, 0.0, 0.0, 113.0)
    assert spent(account, 113.0) == {"startup": 10, "productive": 2, "resize": 1.0}


def test_a_controller_that_returns_goes_on_with_its_account():
    before = begun()
    before.step(1, 1.0, 0.0, 0.0, 112.0)
    account = Account(5000.0)  # another clock
    account.resume(before.view(112.5), away_s=3.0, training=True)
    assert spent(account, 5000.0) == {"startup": 10, "productive": 2, "other": 3.5}
    for step in (2, 3, 4):  # were done meanwhile, and are told all at once
        account.step(step, 1.0, 0.25, 0.0, 5000.25)
    account.step(5, 1.0, 0.0, 0.0, 5001.25)
    assert spent(account, 5001.25) == {"startup": 10, "productive": 2 + 3.25, "data_wait": 0.75, "other": 0.75}
    idle = Account(0.0)
    idle.resume(before.view(112.0), away_s=3.0, training=False)
    idle.begin(2, 1.0)
    idle.step(2, 1.0, 0.0, 0.0, 3.0)
    assert spent(idle, 3.0) == {"startup": 10, "productive": 3, "other": 3, "recovery_plan": 1, "recovery_form": 1}


def test_the_end_of_a_job_is_evaluation_and_its_last_checkpoint():
    account = begun()
    account.evaluation(True, 111.5)
    account.evaluation(True, 112.0)
    assert spent(account, 113.0)["evaluation"] == 1.5
    account.evaluation(False, 114.0)
    account.enter("finished", 114.25)
    account.step(9, 1.0, 0.0, 0.0, 200.0)  # too late
    expected = {"startup": 10, "productive": 1, "checkpoint": 0.75, "evaluation": 2.5}
    assert spent(account, 114.25) == spent(account, 999.0) == expected


def test_an_evaluation_that_broke_off_is_lost():
    account = begun()
    account.evaluation(True, 111.0)
    account.fault(113.0)
    assert spent(account, 113.0) == {"startup": 10, "productive": 1, "lost": 2}


def test_a_skipped_step_did_not_count():
    account = begun()
    account.step(1, 1.0, 0.25, 0.0, 112.0, counts=False)
    account.rollback(0)
    assert spent(account, 112.0) == {"startup": 10, "data_wait": 0.25, "lost": 1.75}


def test_a_job_that_goes_on_from_a_checkpoint_counts_from_there():
    account = begun(step=1_000_000)
    account.step(1_000_001, 1.0, 0.0, 0.0, 112.0)
    account.begin(1_000_001, 112.0)
    assert spent(account, 112.0) == {"startup": 10, "productive": 1, "lost": 1}
    account.begin(7, 112.0)  # an old checkpoint, the newer ones being damaged
    account.step(7, 1.0, 0.0, 0.0, 113.0)
    assert spent(account, 113.0) == {"startup": 10, "productive": 1, "lost": 2}


def test_a_step_whose_report_was_lost_counts_as_done_for_later_rollbacks():
    account = begun()
    account.begin(3, 111.0)  # memory holds steps 1 and 2, which nobody reported
    account.step(3, 1.0, 0.0, 0.0, 112.0)
    account.rollback(3)
    assert spent(account, 112.0) == {"startup": 10, "productive": 1, "lost": 1}
