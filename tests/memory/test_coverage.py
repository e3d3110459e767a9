"""Which state is found after the loss of nodes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.support.memory import Case, cases

from planaria.memory.coverage import Holding, newest_complete
from planaria.memory.table import Table
from planaria.state.boxes import Box, uncovered


def _survivors(holdings: list[Holding], *lost: str) -> list[Holding]:
    return [holding for holding in holdings if holding.node not in lost]


def _covered(case: Case, holdings: list[Holding], tables: dict[str, Table]) -> bool:
    """By the arithmetic of boxes, what newest_complete() finds by counting."""
    for spec in case.specs:
        entries = [entry for holding in holdings for entry in tables[holding.table].entries]
        boxes = [entry.box for entry in entries if entry.tensor == spec.name]
        if uncovered(Box.whole(spec.shape), boxes):
            return False
    return True


@given(cases(), st.integers(0, 2))
def test_without_a_loss_the_state_is_found(case: Case, replicas: int) -> None:
    holdings, tables = case.holdings(replicas)
    assert newest_complete(holdings, tables) == holdings


@given(cases(fewest_nodes=2), st.data())
def test_any_one_node_may_be_lost(case: Case, data: st.DataObject) -> None:
    holdings, tables = case.holdings(1)
    lost = data.draw(st.sampled_from(case.ring))
    assert newest_complete(_survivors(holdings, lost), tables)


@given(cases(fewest_nodes=3), st.data())
def test_with_two_copies_any_two_nodes_may_be_lost(case: Case, data: st.DataObject) -> None:
    holdings, tables = case.holdings(2)
    lost = data.draw(st.lists(st.sampled_from(case.ring), min_size=2, max_size=2))
    assert newest_complete(_survivors(holdings, *lost), tables)


@given(cases(), st.integers(0, 1), st.data())
def test_after_any_losses_it_is_found_exactly_if_every_slice_lives(
    case: Case, replicas: int, data: st.DataObject
) -> None:
    holdings, tables = case.holdings(replicas)
    living = _survivors(holdings, *data.draw(st.sets(st.sampled_from(case.ring))))
    found = newest_complete(living, tables)
    # A state of which nothing lives is not found, even if there is nothing in it.
    assert found == (living if living and _covered(case, living, tables) else [])


@given(cases(), st.data())
def test_the_newest_complete_step_is_chosen(case: Case, data: st.DataObject) -> None:
    older, tables = case.holdings(0, step=4)
    newer, _ = case.holdings(0, step=5)
    lost = data.draw(st.sets(st.sampled_from(range(len(newer)))))
    newer = [holding for at, holding in enumerate(newer) if at not in lost]
    found = newest_complete([*older, *newer], tables)
    assert found == (newer if newer and _covered(case, newer, tables) else older)


@given(cases(), st.data())
def test_generations_are_never_mixed(case: Case, data: st.DataObject) -> None:
    """Together the two generations would cover the step; the younger is chosen if both do."""
    first, tables = case.holdings(0, generation=1, step=5)
    second, _ = case.holdings(0, generation=2, step=5)
    pick = data.draw(st.lists(st.sampled_from([1, 2, 3]), min_size=len(first), max_size=len(first)))
    first = [holding for holding, which in zip(first, pick, strict=True) if which & 1]
    second = [holding for holding, which in zip(second, pick, strict=True) if which & 2]
    found = newest_complete([*first, *second], tables)
    if second and _covered(case, second, tables):
        assert found == second
    elif first and _covered(case, first, tables):
        assert found == first
    else:
        assert not found


def test_nothing_is_found_where_nothing_is_held() -> None:
    assert newest_complete([], {}) == []
