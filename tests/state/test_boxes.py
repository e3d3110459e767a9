"""Box arithmetic against sets of indices."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.state.boxes import Box, BoxError, flat_range_boxes, shard_rows, split_dim, uncovered


def indices(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*map(range, box.offset, box.stop)))


def boxes(dims: int, limit: int = 5) -> st.SearchStrategy[Box]:
    size = st.tuples(*[st.integers(0, limit)] * dims)
    return st.builds(Box, size, size)


several = st.integers(0, 3).flatmap(lambda dims: st.tuples(boxes(dims), st.lists(boxes(dims), max_size=5)))


@given(several)
def test_intersection_and_remainder_are_exact(case):
    target, pieces = case
    for piece in pieces:
        common = target.intersect(piece)
        assert (indices(common) if common else set()) == indices(target) & indices(piece)
        assert common is None or (not common.empty and target.contains(common) and piece.contains(common))
    rest = uncovered(target, pieces)
    expected = indices(target).difference(*map(indices, pieces))
    assert sum(box.numel for box in rest) == len(expected)  # disjoint
    assert set().union(*map(indices, rest)) == expected
    assert not any(box.empty for box in rest)


@given(several)
def test_relative_slices_select_the_box(case):
    target, pieces = case
    for piece in pieces:
        if common := target.intersect(piece):
            moved = Box(tuple(s.start for s in common.relative_to(target)), common.shape)
            assert moved.within(target) == common


@given(st.lists(st.integers(0, 7), min_size=1, max_size=3), st.integers(1, 9))
def test_row_shards_are_those_of_torch_chunk(shape, count):
    import torch

    chunks = [list(part) for part in torch.arange(shape[0]).chunk(count)] if shape[0] else []
    shards = [shard_rows(shape, index, count) for index in range(count)]
    assert not uncovered(Box.whole(shape), shards)
    assert sum(box.numel for box in shards) == Box.whole(shape).numel
    for index, box in enumerate(shards):
        expected = chunks[index] if index < len(chunks) else []
        assert list(range(box.offset[0], box.stop[0])) == [int(row) for row in expected]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 4), st.data())
def test_even_split_and_nested_shards_tile_the_tensor(shape, count, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    shape[dim] *= count
    rows = data.draw(st.integers(1, 5))
    pieces = []
    for part in range(count):
        parent = split_dim(shape, dim, part, count)
        pieces += [shard_rows(parent.shape, index, rows).within(parent) for index in range(rows)]
    assert split_dim(shape, dim - len(shape), 0, count) == split_dim(shape, dim, 0, count)
    assert not uncovered(Box.whole(shape), pieces)
    assert sum(piece.numel for piece in pieces) == Box.whole(shape).numel


@given(st.lists(st.integers(0, 5), max_size=4), st.data())
def test_a_flat_range_is_few_boxes_in_order(shape, data):
    every = list(itertools.product(*map(range, shape)))
    start = data.draw(st.integers(0, len(every)))
    stop = data.draw(st.integers(start, len(every)))
    boxes = flat_range_boxes(shape, start, stop)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    runs = [list(itertools.product(*map(range, box.offset, box.stop))) for box in boxes]
    assert [index for run in runs for index in run] == every[start:stop]  # disjoint, and in the order of the range
    for box, run in zip(boxes, runs, strict=True):
        assert every.index(run[0]) == box.run_in(Box.whole(shape))


@given(several)
def test_runs_are_those_of_the_flattened_array(case):
    target, pieces = case
    every = sorted(indices(target))
    for piece in pieces:
        if common := target.intersect(piece):
            places = [every.index(index) for index in sorted(indices(common))]
            run = places == list(range(places[0], places[0] + len(places)))
            assert common.run_in(target) == (places[0] if run else None)


@given(st.lists(st.integers(1, 5), max_size=3), st.integers(1, 7))
def test_zero_partitions_tile_the_tensor(shape, ranks):
    numel = Box.whole(shape).numel
    size = -(-numel // ranks)
    edges = [min(rank * size, numel) for rank in range(ranks + 1)]
    boxes = [box for start, stop in itertools.pairwise(edges) for box in flat_range_boxes(shape, start, stop)]
    assert not uncovered(Box.whole(shape), boxes) and sum(box.numel for box in boxes) == numel


def test_scalars_are_boxes_too():
    scalar = Box.whole(())
    assert scalar.numel == 1 and not scalar.empty and scalar.stop == ()
    assert scalar.intersect(scalar) == scalar and scalar.relative_to(scalar) == ()
    assert uncovered(scalar, []) == [scalar] and uncovered(scalar, [scalar]) == []


def test_impossible_boxes_are_refused():
    for make in (
        lambda: Box((0,), (1, 2)),
        lambda: Box((-1,), (1,)),
        lambda: split_dim((5, 4), 0, 0, 2),
        lambda: split_dim((4,), 1, 0, 2),
        lambda: split_dim((), 0, 0, 1),
        lambda: split_dim((4,), 0, 2, 2),
        lambda: flat_range_boxes((2, 3), 0, 7),
        lambda: flat_range_boxes((2, 3), -1, 2),
        lambda: flat_range_boxes((), 1, 0),
        lambda: shard_rows((), 0, 2),
        lambda: shard_rows((4,), 0, 0),
        lambda: Box((0,), (3,)).relative_to(Box((1,), (3,))),
        lambda: Box((2,), (2,)).within(Box((5,), (3,))),
        lambda: Box((0,), (1,)).intersect(Box((), ())),
    ):
        with pytest.raises(BoxError):
            make()
