from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planaria.state.replicas import ROOT, Difference, compared, group_of, odd_out


def _with_a_minority(count: int) -> st.SearchStrategy[tuple[int, set[int]]]:
    return st.tuples(st.just(count), st.sets(st.integers(0, count - 1), max_size=(count - 1) // 2))


@given(st.integers(3, 9).flatmap(_with_a_minority))
def test_the_odd_ones_are_named_while_most_agree(case: tuple[int, set[int]]) -> None:
    count, odd = case
    ranks = [2 * at + 1 for at in range(count)]
    digests = [100 + at if at in odd else 7 for at in range(count)]
    assert odd_out(ranks, digests) == tuple(ranks[at] for at in sorted(odd))


def test_without_a_majority_nobody_is_accused() -> None:
    assert odd_out([0, 1], [1, 2]) == ()
    assert odd_out([0, 1, 2, 3], [1, 1, 2, 2]) == ()
    assert odd_out([0, 1, 2], [1, 2, 3]) == ()


def test_only_groups_that_differ_are_listed() -> None:
    found = compared([0, 2, 4], ["a", "b"], [[1, -1], [1, 5], [1, -1]])
    assert (found.ranks, found.groups) == ((0, 2, 4), 2)
    assert found.differ == (Difference("b", (2,), ("f" * 16, f"{5:016x}", "f" * 16)),)


def test_a_tensor_belongs_to_its_unit_or_to_the_root() -> None:
    units = ("layers.1", "layers.10")
    assert [group_of(name, units) for name in ("layers.1.w", "layers.10.w", "layers.2.w", "head")] == [
        "layers.1",
        "layers.10",
        ROOT,
        ROOT,
    ]
