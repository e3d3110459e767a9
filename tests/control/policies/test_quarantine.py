"""Quarantine: for repeated failures, hangs and wrong numbers; bounded, growing, and never silent about the minimum."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.control.policies.quarantine import (
    FIRST_S,
    LONGEST_S,
    REMEMBERED,
    SAME_EVENT_S,
    WINDOW_S,
    Blame,
    Fault,
    Quarantine,
    Record,
    Tolerate,
    carried_out,
    charge,
    decide,
    inherited,
    note,
    sentence_s,
)


def failures(*times: float, fault: Fault = Fault.FAILURE) -> Record:
    record = Record()
    for number, at in enumerate(times):
        record = note(record, Blame(at, fault, f"worker-{number} died"))
    return record


def ask(record: Record, now: float, left: int = 10, allowed: int = 3) -> Quarantine | Tolerate | None:
    return decide("n", record, allowed, left, 4, now)


def test_failures_count_within_the_window():
    assert ask(failures(0, 100), 100) is None
    assert ask(failures(0, 100, 200), 200) == Quarantine(
        "n",
        200 + FIRST_S,
        f"3 failures within {WINDOW_S:.0f} s (worker-0 died; worker-1 died; worker-2 died)",
        10,
    )
    assert ask(failures(0, 400, WINDOW_S), WINDOW_S) is None
    assert ask(failures(0, 100, 200), 200, allowed=4) is None


def test_processes_that_die_together_are_one_failure():
    assert ask(failures(*[10 + 0.1 * n for n in range(8)]), 11) is None
    assert len(failures(10, 10 + SAME_EVENT_S).blames) == 2


def test_zero_forgives_any_number_of_failures_but_not_wrong_numbers():
    many = failures(*range(0, 500, 10))
    assert ask(many, 490, allowed=0) is None
    assert isinstance(ask(note(many, Blame(491, Fault.CHECKSUM, "differs")), 491, allowed=0), Quarantine)


@pytest.mark.parametrize("fault", [Fault.HANG, Fault.CHECKSUM])
def test_a_hang_or_a_wrong_checksum_is_one_too_many(fault):
    decision = ask(failures(5, fault=fault), 5)
    assert isinstance(decision, Quarantine)
    assert decision.reason == "worker-0 died"


def test_the_last_nodes_are_tolerated_and_it_is_said():
    record = failures(0, 100, 200)
    assert ask(record, 200, left=3) == Tolerate("n", charge(record, 3, 200) or "", 3)
    assert isinstance(ask(record, 200, left=4), Quarantine)
    assert isinstance(ask(failures(5, fault=Fault.HANG), 5, left=3), Tolerate)


def test_wrong_numbers_are_never_tolerated():
    decision = ask(failures(5, fault=Fault.CHECKSUM), 5, left=0)
    assert decision == Quarantine("n", 5 + FIRST_S, "worker-0 died", 0, short=True)


def test_a_quarantine_clears_the_charge_and_lengthens_the_next():
    first = ask(failures(0, 10, 20), 20)
    assert isinstance(first, Quarantine)
    record = carried_out(failures(0, 10, 20), first)
    assert record.held(20) and record.held(first.until - 0.1) and not record.held(first.until)
    assert record.reason == first.reason
    assert ask(record, 30) is None
    # What dies because its node is taken away is not held against the node.
    assert note(record, Blame(30, Fault.FAILURE, "ended")) == record
    for at in (100, 110, 120):
        record = note(record, Blame(at, Fault.FAILURE, "again"))
    second = ask(record, 120)
    assert isinstance(second, Quarantine)
    assert second.until - 120 == 2 * FIRST_S


def test_a_long_good_time_is_a_pardon():
    record = Record(sentences=5, until=100.0)
    late, soon = 101 + LONGEST_S, 99 + LONGEST_S
    assert note(record, Blame(soon, Fault.FAILURE, "")).sentences == 5
    assert note(record, Blame(late, Fault.FAILURE, "")).sentences == 0


def test_what_a_node_keeps_under_a_new_name():
    assert inherited(Record(), 10) is None
    assert inherited(failures(5), 10) is None
    assert inherited(failures(5, 10), 10) == failures(5, 10)
    assert inherited(failures(5, 10), 10 + WINDOW_S) is None
    served = Record(sentences=1, until=100.0)
    assert inherited(served, 200) == served
    assert inherited(served, 101 + LONGEST_S) is None


BLAMES = st.lists(st.tuples(st.floats(0, 500), st.sampled_from(Fault), st.integers(0, 20)), max_size=60)


@given(BLAMES, st.integers(0, 5))
def test_quarantines_are_bounded_and_monotone(events, allowed):
    """Whatever happens to a node that is never good for long."""
    record, now, last, longest = Record(), 0.0, 0.0, 0.0
    for pause, fault, left in events:
        now += pause
        record = note(record, Blame(now, fault, "x"))
        assert len(record.blames) <= REMEMBERED
        assert all(now - item.at < WINDOW_S or record.held(now) for item in record.blames)
        decision = decide("n", record, allowed, left, 4, now)
        if isinstance(decision, Tolerate):
            assert left < 4
        if isinstance(decision, Quarantine):
            length = decision.until - now
            assert decision.short == (left < 4)
            assert 0 < length <= LONGEST_S * (1 + 1e-9)
            assert decision.until >= last
            if record.sentences:
                assert length >= longest * (1 - 1e-9)
            last, longest = decision.until, length
            record = carried_out(record, decision)
            assert decide("n", record, allowed, left, 4, now) is None


@given(st.integers(0, 10_000))
def test_sentences_grow_to_a_limit(count):
    assert FIRST_S <= sentence_s(count) <= sentence_s(count + 1) <= LONGEST_S
