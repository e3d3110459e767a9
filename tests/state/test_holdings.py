"""Who holds which box: over all ranks of any layout, every element has exactly one set of holders."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.layout import Layout, LayoutError
from planaria.state.boxes import Box, BoxError, uncovered
from planaria.state.dedupe import is_writer
from planaria.state.holdings import held_box, holders, replicated_axes

layouts = st.builds(Layout, *[st.integers(1, 3)] * 5)


@st.composite
def tensors(draw):
    layout = draw(layouts)
    shape = draw(st.lists(st.integers(1, 5), max_size=3))
    tp_dim = draw(st.one_of(st.none(), st.integers(0, len(shape) - 1))) if shape else None
    if tp_dim is not None:
        shape[tp_dim] *= layout.tp
    return layout, tuple(shape), tp_dim, draw(st.one_of(st.none(), st.integers(0, layout.pp - 1)))


@given(tensors())
def test_distinct_holders_partition_the_tensor(case):
    layout, shape, tp_dim, stage = case
    axes = replicated_axes(shape, tp_dim, stage)
    boxes = {rank: held_box(shape, tp_dim, stage, layout, rank) for rank in range(layout.world)}
    groups = {tuple(holders(layout, rank, axes)): box for rank, box in boxes.items() if box is not None}
    for ranks, box in groups.items():
        assert ranks == tuple(sorted(set(ranks))) and all(boxes[rank] == box for rank in ranks)
        assert sum(is_writer(layout.coords(rank), axes) for rank in ranks) == 1
    assert sorted(rank for ranks in groups for rank in ranks) == [r for r, box in boxes.items() if box is not None]
    assert not uncovered(Box.whole(shape), groups.values())
    assert sum(box.numel for box in groups.values()) == Box.whole(shape).numel
    assert all(boxes[rank] is None for rank in boxes if stage is not None and layout.coords(rank)["pp"] != stage)


@given(layouts, st.sets(st.sampled_from(["pp", "dp_replicate", "dp_shard", "cp", "tp"])), st.data())
def test_holders_are_the_groups_of_the_layout(layout, axes, data):
    rank = data.draw(st.integers(0, layout.world - 1))
    assert holders(layout, rank, axes) in list(layout.groups(*axes))
    assert rank in holders(layout, rank, axes)


def test_impossible_holdings_are_refused():
    layout = Layout(pp=2, tp=2)
    for error, make in (
        (LayoutError, lambda: held_box((4,), None, 2, layout, 0)),
        (LayoutError, lambda: held_box((4,), None, None, layout, 4)),
        (LayoutError, lambda: holders(layout, 0, ["dp"])),
        (BoxError, lambda: held_box((3,), 0, 0, layout, 0)),
    ):
        with pytest.raises(error):
            make()
