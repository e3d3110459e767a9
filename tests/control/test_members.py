"""Places for new workers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.control.members import REMEMBERED, Life, Member, Members, placements


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


def test_of_those_that_were_lost_only_the_last_are_remembered() -> None:
    members = Members("worker")
    for _ in range(REMEMBERED + 10):
        ident = members.next_ident()
        members.add(Member(ident, "a", None))
        assert members.lose(ident)
    assert members.get("worker-9") is None
    assert not members.lose("worker-9")
    assert members.get("worker-10") is not None
    assert len(list(members.of(Life.LOST))) == REMEMBERED
    assert members.next_ident() == f"worker-{REMEMBERED + 10}", "names are never reused"
