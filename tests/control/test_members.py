"""Places for new workers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.control.members import placements


@pytest.mark.parametrize(
    ("capacity", "carried", "wanted", "expected"),
    [
        ({"a": 2, "b": 2}, {}, 3, ["b", "a", "b"]),
        ({"a": 2, "b": 2}, {"b": 1}, 9, ["a", "b", "a"]),
        ({"a": 1, "b": 3}, {}, 2, ["b", "b"]),
        ({"a": 1}, {"a": 2, "gone": 3}, 2, []),
        ({"a": 1}, {}, -1, []),
        ({}, {}, 3, []),
    ],
)
def test_examples(capacity, carried, wanted, expected):
    assert placements(capacity, carried, wanted) == expected


COUNTS = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 5))


@given(COUNTS, COUNTS, st.integers(0, 20))
def test_always_the_node_with_the_most_free_places(capacity, carried, wanted):
    free = {node: count - carried.get(node, 0) for node, count in capacity.items()}
    chosen = placements(capacity, carried, wanted)
    for node in chosen:
        assert free[node] == max(free.values()) > 0
        free[node] -= 1
    assert len(chosen) == wanted or all(count < 1 for count in free.values())
