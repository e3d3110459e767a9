"""Layouts: ranks and coordinates, groups, text form, refusals."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.layout import AXES, Layout, LayoutError

DEGREES = st.integers(1, 5)
LAYOUTS = st.builds(Layout, **dict.fromkeys(AXES, DEGREES))


@given(LAYOUTS)
def test_rank_and_coords_are_inverse(layout):
    for rank in range(layout.world):
        assert layout.rank(**layout.coords(rank)) == rank


@given(LAYOUTS)
def test_ranks_count_through_the_coordinates_last_axis_fastest(layout):
    positions = itertools.product(*(range(degree) for degree in layout.degrees))
    for rank, position in enumerate(positions):
        assert tuple(layout.coords(rank).values())[::-1] == position


@given(LAYOUTS, st.sets(st.sampled_from(AXES)))
def test_groups_partition_the_world(layout, axes):
    groups = list(layout.groups(*axes))
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world))
    size = 1
    for axis in axes:
        size *= getattr(layout, axis)
    fixed = [axis for axis in AXES if axis not in axes]
    for group in groups:
        assert len(group) == size
        assert group == sorted(group)
        assert len({tuple(layout.coords(rank)[axis] for axis in fixed) for rank in group}) == 1


@given(LAYOUTS)
def test_tp_groups_are_neighbours(layout):
    for group in layout.groups("tp"):
        assert group == list(range(group[0], group[0] + layout.tp))


@given(LAYOUTS)
def test_dp_rank_numbers_the_slices_of_the_batch(layout):
    ranks = [layout.dp_rank(rank) for rank in range(layout.world)]
    assert set(ranks) == set(range(layout.dp))
    # Ranks that share a slice are exactly those that differ in pp, cp or tp alone.
    for group in layout.groups("pp", "cp", "tp"):
        assert len({ranks[rank] for rank in group}) == 1
    assert len(list(layout.groups("pp", "cp", "tp"))) == layout.dp


@given(LAYOUTS)
def test_text_form_round_trips(layout):
    assert Layout.parse(str(layout)) == layout


def test_text_forms():
    assert str(Layout()) == "single"
    assert str(Layout(dp_shard=3, tp=2)) == "dp_shard3xtp2"
    assert Layout.parse("pp2xdp_replicate12") == Layout(pp=2, dp_replicate=12)


@pytest.mark.parametrize(
    "text", ["", "tp", "2", "tp2x", "xtp2", "tp2xtp2", "ep2", "tp2 x dp_shard2", "tp-2", "tp0", "single2", "tp2.5"]
)
def test_unreadable_text(text):
    with pytest.raises(LayoutError):
        Layout.parse(text)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("degree", [0, -1, 1.0, 2.5, True, None, "2"])
def test_bad_degree(axis, degree):
    with pytest.raises(LayoutError, match=f"{axis}={degree!r} must be an integer of at least 1"):
        Layout(**{axis: degree})


@given(LAYOUTS, st.integers())
def test_rank_outside_the_world(layout, rank):
    if 0 <= rank < layout.world:
        layout.coords(rank)
    else:
        with pytest.raises(LayoutError, match=f"rank {rank} is outside a world of {layout.world}"):
            layout.coords(rank)


def test_coordinate_outside_its_axis():
    with pytest.raises(LayoutError, match=r"tp=2 is outside 0\.\.1"):
        Layout(tp=2).rank(tp=2)


def test_unknown_axis_is_refused():
    with pytest.raises(LayoutError, match="ep"):
        Layout().rank(ep=0)
    with pytest.raises(LayoutError, match="ep"):
        list(Layout().groups("ep"))


def test_left_out_coordinates_are_zero():
    assert Layout(dp_shard=2, tp=2).rank(dp_shard=1) == 2
