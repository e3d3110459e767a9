"""Promotion: standbys of the node first, then spares, each used once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planaria.control.policies.standby import Kind, Place, Promotion, promote


def test_nothing_is_lost():
    assert promote({}, {"a": ["s"]}, {"b": ["x"]}) == Promotion((), ())
    assert promote({"a": []}, {"a": ["s"]}, {}) == Promotion((), ())


def test_the_standby_of_the_same_node_comes_first():
    assert promote({"a": ["w0"]}, {"a": ["s0", "s1"]}, {"a": ["x0"], "b": ["x1"]}) == Promotion(
        (Place("w0", "s0", "a", Kind.STANDBY),), ()
    )


def test_a_standby_does_not_serve_another_node():
    assert promote({"a": ["w0"]}, {"b": ["s0"]}, {}) == Promotion((), ("w0",))


def test_then_a_spare_of_the_same_node_then_of_the_fullest():
    found = promote({"a": ["w0", "w1", "w2"]}, {"a": ["s0"]}, {"b": ["x1"], "c": ["x2", "x3"], "a": ["x0"]})
    assert found.places == (
        Place("w0", "s0", "a", Kind.STANDBY),
        Place("w1", "x0", "a", Kind.SPARE),
        Place("w2", "x2", "c", Kind.SPARE),
    )


def test_a_node_that_is_gone_is_replaced_by_spares_of_one_node():
    found = promote({"a": ["w0", "w1"]}, {}, {"b": ["x0"], "c": ["x1", "x2"], "d": ["x3"]})
    assert [place.node for place in found.places] == ["c", "c"]


def test_who_is_not_replaced_is_named():
    found = promote({"a": ["w0", "w1"], "b": ["w2"]}, {"b": ["s0"]}, {"c": ["x0"]})
    assert found.vacant == ("w1",)
    assert {place.lost for place in found.places} == {"w0", "w2"}


NAMES = st.sampled_from("abcd")


@given(st.dictionaries(NAMES, st.integers(0, 3)), st.dictionaries(NAMES, st.integers(0, 2)), st.data())
def test_everybody_is_used_once_and_as_many_as_possible(lost_counts, standby_counts, data):
    spare_counts = data.draw(st.dictionaries(NAMES, st.integers(0, 3)))
    lost = {node: [f"w-{node}{n}" for n in range(count)] for node, count in lost_counts.items()}
    standbys = {node: [f"s-{node}{n}" for n in range(count)] for node, count in standby_counts.items()}
    spares = {node: [f"x-{node}{n}" for n in range(count)] for node, count in spare_counts.items()}
    found = promote(lost, standbys, spares)
    everyone = [member for members in lost.values() for member in members]
    assert sorted([*(place.lost for place in found.places), *found.vacant]) == sorted(everyone)
    assert len({place.by for place in found.places}) == len(found.places)
    for place in found.places:
        where = standbys if place.kind is Kind.STANDBY else spares
        assert place.by in where[place.node]
        assert place.kind is Kind.SPARE or place.lost in lost[place.node]
    by_standby = sum(min(len(members), len(standbys.get(node, ()))) for node, members in lost.items())
    assert sum(place.kind is Kind.STANDBY for place in found.places) == by_standby
    free = sum(map(len, spares.values()))
    assert len(found.vacant) == max(0, len(everyone) - by_standby - free)
    backwards = [dict(reversed(list(tree.items()))) for tree in (lost, standbys, spares)]
    assert promote(*backwards) == found
