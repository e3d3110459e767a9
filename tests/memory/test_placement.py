"""Who keeps, who copies, and to where."""

from __future__ import annotations

from collections import Counter, defaultdict

from hypothesis import given
from hypothesis import strategies as st
from tests.support.memory import Case, cases

from planaria.memory.placement import partners, shipments
from planaria.state.boxes import Box

replicas = st.integers(0, 3)


def _places(case: Case, copies: int) -> dict[tuple[str, Box], list[str]]:
    """Nodes to which each slice comes: once for each time that it is kept or sent."""
    found: dict[tuple[str, Box], list[str]] = defaultdict(list)
    holdings, tables = case.holdings(copies)
    for holding in holdings:
        for entry in tables[holding.table].entries:
            if entry.nbytes:
                found[entry.tensor, entry.box].append(holding.node)
    return found


@given(cases(), replicas)
def test_no_node_holds_a_slice_twice(case: Case, copies: int) -> None:
    for (name, box), places in _places(case, copies).items():
        assert max(Counter(places).values()) == 1, f"{name}{box} is on {places}"


@given(cases(), replicas)
def test_every_slice_is_on_as_many_nodes_as_wanted_or_as_there_are(case: Case, copies: int) -> None:
    ranks: dict[tuple[str, Box], set[str]] = defaultdict(set)
    for spec in case.specs:
        for rank, box, _ in spec.boxes(case.layout):
            if not box.empty:
                ranks[spec.name, box].add(case.nodes[rank])
    places = _places(case, copies)
    assert places.keys() == ranks.keys()
    for key, holders in ranks.items():
        wanted = max(len(holders), min(copies + 1, len(case.ring)))
        assert set(places[key]) >= holders
        assert len(places[key]) == wanted


@given(cases())
def test_every_slice_has_one_writer(case: Case) -> None:
    entries = [entry for table in case.tables() for entry in table.entries if entry.nbytes]
    writers = Counter((entry.tensor, entry.box) for entry in entries if entry.primary)
    assert set(writers.values()) <= {1}
    assert writers.keys() == {(entry.tensor, entry.box) for entry in entries}


@given(cases(), replicas)
def test_nothing_is_sent_to_the_own_node_or_to_one_that_holds_it_anyway(case: Case, copies: int) -> None:
    for rank, table in enumerate(case.tables()):
        for node, chosen in shipments(table, case.nodes[rank], case.ring, copies).items():
            assert node != case.nodes[rank]
            assert chosen == sorted(set(chosen))
            for at in chosen:
                assert table.entries[at].lead
                assert node not in table.entries[at].nodes


def test_each_node_sends_to_the_next_so_that_all_keep_alike() -> None:
    ring = ["a", "b", "c"]
    assert [partners((own,), own, ring, 1) for own in ring] == [["b"], ["c"], ["a"]]


def test_data_parallel_duplicates_count_as_copies() -> None:
    assert partners(("a", "b"), "a", ["a", "b", "c"], 1) == []
    assert partners(("a", "b"), "a", ["a", "b", "c"], 2) == ["c"]


def test_a_node_alone_has_nobody_to_send_to() -> None:
    assert partners(("a",), "a", ["a"], 1) == []
    assert partners(("a",), "a", [], 1) == []
