"""The budget of failures: progress is free, the same bug twice is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.control.policies.decisions import GiveUp
from planaria.control.policies.failure import Continue, Failure, FailurePolicy, Generation, UserError


def failed(*last_steps: int | None, cause: str = "node lost") -> list[Generation]:
    """Generations that each ended in a failure, with the highest step that each completed."""
    return [Generation(number, last, Failure(cause, step=(last or 0) + 1)) for number, last in enumerate(last_steps, 1)]


def bug(number: int, step: int, message: str = "bad shape", kind: str = "ValueError") -> Generation:
    error = UserError(kind, message)
    return Generation(number, step - 1, Failure(str(error), step, error))


@pytest.mark.parametrize("allowed", [1, 2, 3, 5])
def test_failures_without_progress_are_counted(allowed):
    policy = FailurePolicy(allowed)
    for count in range(1, allowed + 1):
        assert policy.decide(failed(*[None] * count)) == Continue(count)
    assert isinstance(policy.decide(failed(*[None] * (allowed + 1))), GiveUp)


def test_a_new_highest_step_resets_the_count():
    policy = FailurePolicy(2)
    assert policy.decide(failed(10, 10, 11, 11)) == Continue(2)
    assert isinstance(policy.decide(failed(10, 10, 10)), GiveUp)


def test_steps_done_again_are_no_progress():
    # Each generation redoes steps after a rollback, and none gets past step 10.
    assert isinstance(FailurePolicy(2).decide(failed(10, 8, 9)), GiveUp)
    assert FailurePolicy(2).decide(failed(10, 8, 11)) == Continue(1)


def test_steady_progress_goes_on_for_ever():
    assert FailurePolicy(1).decide(failed(*range(1000))) == Continue(1)


def test_the_first_step_is_step_zero_and_counts():
    assert FailurePolicy(1).decide(failed(None, 0)) == Continue(1)


def test_zero_forgives_nothing():
    decision = FailurePolicy(0).decide(failed(10))
    assert decision == GiveUp("node lost at step 11, and elastic.max_failures=0 forgives no failure")


def test_a_negative_limit_forgives_everything():
    assert FailurePolicy(-1).decide(failed(*[None] * 500)) == Continue(500)


def test_planned_changes_do_not_count():
    history = failed(None, None)
    history.insert(1, Generation(9, None, None))
    assert FailurePolicy(2).decide(history) == Continue(2)


def test_progress_of_a_planned_generation_resets():
    history = [*failed(5, 5), Generation(3, 6, None), Generation(4, None, Failure("node lost", 7))]
    assert FailurePolicy(2).decide(history) == Continue(1)


def test_nothing_happened_yet():
    assert FailurePolicy(0).decide([]) == Continue(0)
    assert FailurePolicy(0).decide([Generation(1, 5, None)]) == Continue(0)


def test_diagnosis_gives_numbers_causes_and_remedy():
    history = failed(7, None, None)
    history[1] = Generation(2, None, Failure("worker w3 hung", 8))
    decision = FailurePolicy(2).decide(history)
    assert decision == GiveUp(
        "3 failures in a row without progress (no step after 7 was completed; elastic.max_failures=2). "
        "Causes: node lost, worker w3 hung. Fix the cause, or raise elastic.max_failures; "
        "the job resumes from its last checkpoint"
    )
    assert "no step was ever completed" in FailurePolicy(1).decide(failed(None, None)).reason


@given(st.lists(st.none() | st.integers(0, 5), max_size=12), st.integers(0, 4))
def test_count_equals_failures_since_the_highest_step_was_first_reached(steps, allowed):
    reached = [step for step in steps if step is not None]
    since = len(steps) - (steps.index(max(reached)) if reached else 0)
    decision = FailurePolicy(allowed).decide(failed(*steps))
    if since > allowed:
        assert isinstance(decision, GiveUp)
    else:
        assert decision == Continue(since)


# The user's own errors


def test_the_same_user_error_twice_gives_up_at_once():
    policy = FailurePolicy(100)
    assert policy.decide([bug(1, 5)]) == Continue(1)
    assert policy.decide([bug(1, 5), bug(2, 5)]) == GiveUp(
        "the job's own code fails at step 5 every time, in generations 1 and 2 alike: ValueError: bad shape. "
        "Trying again cannot help; fix the code or the data"
    )


def test_also_with_another_failure_between_them_and_without_limit():
    history = [bug(1, 5), Generation(2, 4, Failure("node lost", 5)), bug(3, 5)]
    assert isinstance(FailurePolicy(-1).decide(history), GiveUp)


@pytest.mark.parametrize(
    "second",
    [
        bug(2, 6),
        bug(2, 5, message="other"),
        bug(2, 5, kind="KeyError"),
        Generation(2, 4, Failure("ValueError: bad shape", 5)),
    ],
)
def test_other_step_message_type_or_origin_is_not_the_same_error(second):
    assert isinstance(FailurePolicy(100).decide([bug(1, 5), second]), Continue)


def test_only_the_newest_failure_is_judged():
    history = [bug(1, 5), bug(2, 6), Generation(3, 9, Failure("node lost", 10))]
    assert FailurePolicy(3).decide(history) == Continue(1)


def test_addresses_and_ranks_do_not_hide_a_repeated_error():
    first = bug(1, 5, "on rank 3 (pid=812): <Box at 0x7f00ab> has shape 4")
    assert isinstance(
        FailurePolicy(9).decide([first, bug(2, 5, "on rank 0 (pid=99): <Box at 0x55> has shape 4")]), GiveUp
    )
    assert isinstance(
        FailurePolicy(9).decide([first, bug(2, 5, "on rank 0 (pid=99): <Box at 0x55> has shape 5")]), Continue
    )


def test_user_error_without_message():
    assert str(UserError("AssertionError", "")) == "AssertionError"


@given(st.lists(st.integers(1, 3), min_size=1, max_size=60), st.integers(1, 4))
def test_failures_with_progress_never_use_the_budget_up(gains, allowed):
    history, step = [], 0
    for number, gain in enumerate(gains, 1):
        step += gain
        history.append(Generation(number, step, Failure("node lost", step + 1)))
        assert FailurePolicy(allowed).decide(history) == Continue(1)
