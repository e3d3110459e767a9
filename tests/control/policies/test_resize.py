"""Resize: within the limits, stable, and growing only when it is worth an interruption."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.config import ElasticConfig
from planaria.control.policies.decisions import Keep
from planaria.control.policies.resize import (
    LONGEST_SETTLE_S,
    PATIENCE,
    Calm,
    Grow,
    growths_undone,
    resize,
    settle_time,
)


def limits(low: int = 2, high: int = 8) -> ElasticConfig:
    return ElasticConfig(min_workers=low, max_workers=high)


@pytest.mark.parametrize(
    ("running", "ready", "expected"),
    [
        (4, 4, Keep()),
        (4, 6, Grow(6)),
        (4, 20, Grow(8)),
        (8, 20, Keep()),
        (4, 3, Keep()),
        (12, 12, Keep()),
        (2, 0, Keep()),
    ],
)
def test_resize(running, ready, expected):
    assert resize(running, ready, limits()) == expected


def test_resize_is_stable_and_within_limits():
    for running, ready in itertools.product(range(12), range(12)):
        decision = resize(running, ready, limits())
        if isinstance(decision, Grow):
            assert running < decision.workers <= 8
            assert resize(decision.workers, ready, limits()) == Keep()


@pytest.mark.parametrize(
    ("ready", "calm", "expected"),
    [
        (6, Calm(quiet_s=4.9, waiting_s=10, settle_s=5), Keep()),
        (6, Calm(quiet_s=5, waiting_s=10, settle_s=5), Grow(6)),
        (8, Calm(quiet_s=0, waiting_s=0, settle_s=5), Grow(8)),
        (20, Calm(quiet_s=0, waiting_s=0, settle_s=5), Grow(8)),
        (6, Calm(quiet_s=0, waiting_s=PATIENCE * 5, settle_s=5), Grow(6)),
        (6, Calm(quiet_s=0, waiting_s=0, settle_s=0), Grow(6)),
        (3, Calm(quiet_s=9, waiting_s=9, settle_s=5), Keep()),
    ],
)
def test_growth_waits_until_the_set_is_quiet_and_nothing_else_does(ready, calm, expected):
    assert resize(4, ready, limits(), calm=calm) == expected


def test_nodes_that_join_one_after_the_other_cost_one_interruption():
    joins, interruptions, running = [10.0, 12.0, 15.0, 19.0], 0, 2
    for tick in range(400):
        now = tick * 0.1
        ready = 2 + sum(at <= now for at in joins)
        since = [now - at for at in joins if at <= now]
        calm = Calm(min(since, default=now), max(since, default=0.0), settle_time(5, 1, 0))
        decision = resize(running, ready, limits(), calm=calm)
        if isinstance(decision, Grow):
            running, interruptions = decision.workers, interruptions + 1
    assert (running, interruptions) == (6, 1)


@pytest.mark.parametrize(("stay_s", "away_s"), [(8.0, 4.0), (3.0, 3.0), (12.0, 30.0)])
def test_a_node_that_comes_and_goes_interrupts_ever_more_rarely(stay_s, away_s):
    """A change takes 2 s, each stay is shorter than ten of them, so no growth pays; after an hour it must be rare."""
    grown, stays, joined, present, running = [], [], 0.0, False, 2
    toggle = away_s
    for tick in range(36_000):
        now = tick * 0.1
        if now >= toggle:
            present = not present
            toggle += stay_s if present else away_s
            if present:
                joined = now
            elif running == 3:
                running = 2
                stays.append(now - grown[-1])
        calm = Calm(now - joined, now - joined, settle_time(5, 2, growths_undone(stays, 2)))
        if present and isinstance(resize(running, 3, limits(), calm=calm), Grow):
            running = 3
            grown.append(now)
    assert len(grown) <= 2


def test_growth_that_lasted_clears_the_record():
    assert growths_undone([], 2) == 0
    assert growths_undone([3, 4], 2) == 2
    assert growths_undone([3, 4, 20], 2) == 0
    assert growths_undone([3, 400, 4], 2) == 1


@given(st.floats(0, 100), st.floats(0, 1e4), st.integers(0, 5000))
def test_settle_time_is_bounded_and_monotone(settle, change, undone):
    time = settle_time(settle, change, undone)
    assert min(settle, LONGEST_SETTLE_S) <= time <= max(LONGEST_SETTLE_S, settle)
    assert time <= settle_time(settle, change, undone + 1)
