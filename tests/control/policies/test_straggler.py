"""Stragglers: found after a while, never among equals, cleared after a while."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.control.policies.straggler import (
    WINDOWS,
    Replace,
    Standing,
    Straggler,
    _median_without,
    judge,
    replacement,
)

RATIO = 1.5


def nodes(count: int) -> dict[int, str]:
    return {rank: f"node{rank // 2}" for rank in range(count)}


def window(*factors: float, seed: int = 0) -> dict[int, list[float]]:
    """Ten steps of about a second, with 1 % noise, times each rank's factor."""
    noise = random.Random(seed)
    return {rank: [factor * noise.gauss(1, 0.01) for _ in range(10)] for rank, factor in enumerate(factors)}


def after(*windows: dict[int, list[float]], places: dict[int, str] | None = None) -> Standing:
    standing = Standing()
    for seconds in windows:
        standing = judge(seconds, places or nodes(len(seconds)), standing, RATIO)
    return standing


def ranks(standing: Standing) -> list[int]:
    return [item.rank for item in standing.stragglers]


def test_a_slow_rank_is_one_after_some_windows_and_is_named():
    slow = window(1, 1, 2, 1)
    assert ranks(after(*[slow] * (WINDOWS - 1))) == []
    (found,) = after(*[slow] * WINDOWS).stragglers
    assert (found.rank, found.node) == (2, "node1")
    assert found.ratio == pytest.approx(2, rel=0.05)


def test_once_is_no_pattern():
    slow, fine = window(1, 1, 2, 1), window(1, 1, 1, 1)
    assert ranks(after(*([slow] * (WINDOWS - 1) + [fine]) * 5)) == []


def test_only_ranks_of_one_pipeline_stage_are_compared():
    standing, heavy = Standing(), {rank: rank // 2 for rank in range(4)}
    for _ in range(WINDOWS):
        standing = judge(window(3, 3, 1, 2), nodes(4), standing, RATIO, stages=heavy)
    assert ranks(standing) == [3]  # the first stage has more to do, which makes nobody slow


def test_of_two_ranks_the_slower_one_is_found():
    assert ranks(after(*[window(1, 1.8)] * WINDOWS)) == [1]
    assert ranks(after(*[window(1, 1.4)] * WINDOWS)) == []


def test_one_rank_has_no_peers():
    assert after(*[window(7)] * 5) == Standing()
    assert judge({}, {}, Standing(), RATIO) == Standing()


def test_a_few_slow_steps_do_not_make_a_slow_window():
    seconds = window(1, 1, 1, 1)
    seconds[1][:4] = [50.0] * 4
    assert ranks(after(*[seconds] * WINDOWS)) == []


def test_where_all_scatter_nobody_stands_out():
    assert ranks(after(*[window(0.4, 0.7, 1, 1.3, 1.6, 1.9)] * WINDOWS)) == []


def test_the_worst_comes_first():
    assert ranks(after(*[window(1, 2, 1, 3, 1, 1, 1)] * WINDOWS)) == [3, 1]


def test_it_stays_one_until_it_is_clearly_well():
    flagged = [window(1, 1, 2, 1)] * WINDOWS
    between, well = window(1, 1, 1.35, 1), window(1, 1, 1.1, 1)
    assert ranks(after(*flagged, *[between] * 10)) == [2]
    assert ranks(after(*flagged, *[well] * (WINDOWS - 1))) == [2]
    assert ranks(after(*flagged, *[well] * WINDOWS)) == []
    assert ranks(after(*flagged, *([well] * (WINDOWS - 1) + [between]) * 4)) == [2]


def test_another_node_starts_with_a_clean_record():
    slow = window(1, 1, 2, 1)
    standing = after(*[slow] * WINDOWS)
    moved = judge(slow, nodes(4) | {2: "elsewhere"}, standing, RATIO)
    assert ranks(moved) == []
    assert moved.slow == {("rank 2", "elsewhere"): 1}


def test_a_record_follows_its_process_to_another_rank():
    names = {rank: f"worker-{rank}" for rank in range(4)}
    standing = Standing()
    for _ in range(WINDOWS):
        standing = judge(window(1, 1, 2, 1), nodes(4), standing, RATIO, names)
    assert standing.stragglers[0].member == "worker-2"
    # The first node is lost: ranks move up by two, nodes stay with their processes.
    moved = judge(window(2, 1), {0: "node1", 1: "node1"}, standing, RATIO, {0: "worker-2", 1: "worker-3"})
    assert [(item.rank, item.member, item.node) for item in moved.stragglers] == [(0, "worker-2", "node1")]


def test_ranks_without_times_are_not_judged():
    assert ranks(after(*[window(1, 1, 2, 1) | {2: []}] * WINDOWS)) == []


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_a_ratio_must_be_one(ratio):
    with pytest.raises(ValueError, match="must be above 1"):
        judge(window(1, 1), nodes(2), Standing(), ratio)


@given(st.lists(st.floats(0.001, 100), min_size=2, max_size=9))
def test_median_without_one(values):
    order = sorted(values)
    for index, value in enumerate(order):
        assert _median_without(order, value) == statistics.median(order[:index] + order[index + 1 :])


@given(st.lists(st.floats(1, 1.49), min_size=2, max_size=8), st.integers(1, 6))
def test_nobody_within_the_ratio_is_ever_flagged(factors, count):
    seconds = {rank: [factor] * 3 for rank, factor in enumerate(factors)}
    assert after(*[seconds] * count) == Standing()


@given(st.lists(st.lists(st.floats(0.1, 10), min_size=4, max_size=4), max_size=12))
def test_flagged_only_after_as_many_slow_windows_and_counts_are_bounded(rows):
    standing, slow_in_a_row = Standing(), dict.fromkeys(range(4), 0)
    for row in rows:
        seconds = {rank: [value] for rank, value in enumerate(row)}
        before = ranks(standing)
        standing = judge(seconds, nodes(4), standing, RATIO)
        for rank, value in enumerate(row):
            others = statistics.median(row[:rank] + row[rank + 1 :])
            slow_in_a_row[rank] = slow_in_a_row[rank] + 1 if value / others >= RATIO else 0
            if rank in ranks(standing) and rank not in before:
                assert slow_in_a_row[rank] >= WINDOWS
        assert all(count < WINDOWS for count in [*standing.slow.values(), *standing.calm.values()])


def test_replacement_is_the_worst_by_a_spare_of_another_node():
    standing = Standing(stragglers=(Straggler(3, "b", 3.0), Straggler(1, "a", 2.0)))
    spares = {"a": ["s0", "s1", "s2"], "c": ["s3"], "d": ["s4", "s5"], "e": []}
    assert replacement(standing, spares, enabled=True) == Replace(Straggler(3, "b", 3.0), "s4", "d")
    assert replacement(standing, spares, enabled=False) is None
    assert replacement(standing, {"a": ["s0"]}, enabled=True) is None
    assert replacement(standing, {}, enabled=True) is None
    assert replacement(Standing(), spares, enabled=True) is None
