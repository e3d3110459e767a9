"""The slice index, and who writes a replicated slice."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.layout import Layout
from planaria.state.boxes import Box, shard_rows, split_dim, uncovered
from planaria.state.dedupe import is_writer
from planaria.state.index import Index, Slice, SliceError

FILE = "shard-00000.safetensors"


def piece(box: Box, shape: tuple[int, ...], file: str = FILE, tensor: str = "w") -> Slice:
    return Slice(tensor, shape, "F32", box, file, f"{tensor}{box}", bytes(16), 4 * box.numel)


grids = st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))


@given(grids, st.data())
def test_lookup_fills_any_box(grid, data):
    rows, columns, row_parts, column_parts = grid
    shape = (rows, columns * column_parts)
    slices = []
    for part in range(column_parts):
        parent = split_dim(shape, 1, part, column_parts)
        shards = [shard_rows(parent.shape, index, row_parts).within(parent) for index in range(row_parts)]
        slices += [piece(box, shape) for box in shards if not box.empty]
    slices += data.draw(st.lists(st.sampled_from(slices), max_size=3))  # replicas
    index = Index.of(data.draw(st.permutations(slices)))
    assert index.missing() == {}
    assert list(Index.from_json(json.loads(json.dumps(index.to_json())))) == list(index)
    offset = tuple(data.draw(st.integers(0, size)) for size in shape)
    box = Box(offset, tuple(data.draw(st.integers(0, size - at)) for size, at in zip(shape, offset, strict=True)))
    found = index.lookup("w", box)
    assert not uncovered(box, [common for _, common in found])
    assert sum(common.numel for _, common in found) == box.numel  # disjoint, so nothing is read twice
    assert all(item.box.contains(common) for item, common in found)


def test_lookup_prefers_fewest_reads():
    whole = piece(Box.whole((4, 4)), (4, 4))
    index = Index.of([piece(shard_rows((4, 4), i, 4), (4, 4)) for i in range(4)] + [whole])
    assert [item for item, _ in index.lookup("w", Box((1, 0), (2, 4)))] == [whole]
    assert [item.box for item, _ in index.lookup("w", Box((1, 0), (1, 4)))] == [Box((1, 0), (1, 4))]


def test_missing_parts_are_named():
    index = Index.of([piece(Box((0, 0), (2, 3)), (4, 3)), piece(Box((3, 0), (1, 2)), (4, 3))])
    (gaps,) = index.missing().values()
    assert sorted(gaps) == [Box((2, 0), (1, 3)), Box((3, 2), (1, 1))]
    with pytest.raises(SliceError, match=r"\[2:3,0:3\]"):
        index.lookup("w", Box((1, 0), (2, 3)))
    with pytest.raises(SliceError, match="exceeds"):
        index.lookup("w", Box((1, 0), (4, 3)))


def test_contradictions_are_refused():
    good = piece(Box((0,), (2,)), (4,))
    for bad in (
        replace(good, global_shape=(5,)),
        replace(good, dtype="BF16"),
        replace(good, box=Box((3,), (2,))),
        replace(good, file="../shard-00000.safetensors"),
    ):
        with pytest.raises(SliceError):
            Index.of([good, bad])
    assert Slice.from_json(json.loads(json.dumps(good.to_json()))) == good


degrees = st.builds(Layout, *[st.just(1), st.integers(1, 3), st.integers(1, 5), st.integers(1, 2), st.integers(1, 4)])


@given(degrees, st.integers(1, 7), st.integers(1, 3), st.sampled_from([None, 0, 1]))
def test_every_element_has_exactly_one_writer(layout, rows, columns, tp_dim):
    shape = (rows * layout.tp, columns * layout.tp)
    replicated = {"pp", "dp_replicate", "cp"} | ({"tp"} if tp_dim is None else set())
    written = []
    for rank in range(layout.world):
        at = layout.coords(rank)
        parent = Box.whole(shape) if tp_dim is None else split_dim(shape, tp_dim, at["tp"], layout.tp)
        if is_writer(at, replicated):
            written.append(shard_rows(parent.shape, at["dp_shard"], layout.dp_shard).within(parent))
    assert not uncovered(Box.whole(shape), written)
    assert sum(box.numel for box in written) == Box.whole(shape).numel
    everywhere = [is_writer(layout.coords(rank), layout.coords(rank)) for rank in range(layout.world)]
    assert everywhere.count(True) == 1  # a scalar, held by all


def test_unknown_axis_is_named():
    with pytest.raises(ValueError, match="dq"):
        is_writer({"tp": 0}, ["dq"])
