from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.data.plan import micro_batch_plan, micro_batches, slice_bounds

small = st.integers(1, 80)


@settings(max_examples=150, deadline=None)
@given(global_batch=small, dp_size=small, micro_batch=small)
def test_every_offset_once_and_equal_counts(global_batch: int, dp_size: int, micro_batch: int) -> None:
    plan = micro_batch_plan(global_batch, dp_size, micro_batch)
    assert len(plan.slices) == dp_size
    offsets: list[int] = []
    for dp_rank in range(dp_size):
        pieces = plan.pieces(dp_rank)
        assert len(pieces) == plan.count
        sizes = [hi - lo for lo, hi in pieces]
        assert max(sizes) <= micro_batch and max(sizes) - min(sizes) <= 1
        offsets.extend(offset for lo, hi in pieces for offset in range(lo, hi))
    assert offsets == list(range(global_batch))


@settings(max_examples=100, deadline=None)
@given(global_batch=small, dp_size=small, micro_batch=small)
def test_the_count_is_the_least_possible(global_batch: int, dp_size: int, micro_batch: int) -> None:
    plan = micro_batch_plan(global_batch, dp_size, micro_batch)
    assert (plan.count - 1) * micro_batch < max(hi - lo for lo, hi in plan.slices) <= plan.count * micro_batch


@settings(max_examples=100, deadline=None)
@given(global_batch=small, dp_size=small)
def test_slices_are_even(global_batch: int, dp_size: int) -> None:
    sizes = [hi - lo for lo, hi in slice_bounds(global_batch, dp_size)]
    assert sum(sizes) == global_batch and max(sizes) - min(sizes) <= 1


def test_worked_example() -> None:
    plan = micro_batch_plan(10, 3, 2)
    assert plan.slices == ((0, 4), (4, 7), (7, 10)) and plan.count == 2
    assert [plan.pieces(rank) for rank in range(3)] == [[(0, 2), (2, 4)], [(4, 6), (6, 7)], [(7, 9), (9, 10)]]
    assert micro_batches(7, 8, 3) == [(7, 8), (8, 8), (8, 8)]


def test_more_ranks_than_samples_leaves_empty_slices() -> None:
    plan = micro_batch_plan(2, 5, 4)
    assert plan.count == 1 and [hi - lo for lo, hi in plan.slices] == [1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: slice_bounds(0, 1), "global_batch=0"),
        (lambda: slice_bounds(1, 0), "dp_size=0"),
        (lambda: micro_batch_plan(1, 1, 0), "micro_batch=0"),
        (lambda: micro_batches(0, 4, 0), "count=0"),
        (lambda: micro_batches(4, 0, 1), "backwards"),
    ],
)
def test_nonsense_is_refused(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        call()
