"""Stage cuts against brute force; schedules and their bubbles against the formulas of their papers."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.planner.bubble import Deadlock, simulate
from planaria.planner.schedules import SCHEDULES, Action, Kind, most_in_flight, orders
from planaria.planner.stages import Unit, costs, cut, equal, slowest

UNIT = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.INPUT: 1.0, Kind.WEIGHT: 1.0}
COSTS = st.lists(st.integers(0, 20).map(float), min_size=1, max_size=9)


@given(COSTS, st.integers(1, 9), st.integers(0, 30).map(float), st.integers(0, 30).map(float))
def test_cuts_are_optimal(cost, stages, first, last):
    stages = min(stages, len(cost))
    bounds = cut(cost, stages, first, last)
    assert len(bounds) == stages + 1 and bounds[0] == 0 and bounds[-1] == len(cost)
    assert all(a < b for a, b in pairwise(bounds))
    every = ((0, *inner, len(cost)) for inner in combinations(range(1, len(cost)), stages - 1))
    best = min(slowest(cost, each, first, last) for each in every)
    assert slowest(cost, bounds, first, last) == pytest.approx(best, rel=1e-8)


def test_more_stages_than_units():
    with pytest.raises(ValueError, match="2 units cannot be cut into 3 stages"):
        cut([1.0, 1.0], 3)


def test_frozen_units_cost_less_and_least_before_anything_trains():
    units = [Unit(1, trains=False), Unit(1), Unit(1, trains=False), Unit(1), Unit(1, backward=5)]
    assert costs(units) == [1, 2, 2, 3, 6]


def test_a_frozen_tower_is_given_fewer_ranks_than_its_layers_suggest():
    units = [Unit(0.5, trains=False)] * 32 + [Unit(1.0)] * 32
    cost = costs(units)
    assert cut(cost, 4) == (0, 34, 44, 54, 64)  # the whole tower fits beside two layers of the decoder
    assert slowest(cost, cut(cost, 4)) == 30
    assert cut([0.005 * one for one in cost], 4) == (0, 34, 44, 54, 64)  # whatever the rounding
    assert slowest(cost, equal(64, 4)) == 48


def unit(virtual):
    return lambda action: UNIT[action.kind] / virtual


CASES = [(name, virtual) for name in SCHEDULES for virtual in (1, 2, 3) if virtual == 1 or name[0] in "iz"]


@pytest.mark.parametrize(("name", "virtual"), CASES)
def test_every_schedule_does_everything_once_within_its_memory_and_never_deadlocks(name, virtual):
    for pp in (1, 2, 3, 4):
        for micros in (1, 2, 3, 5, 8):
            made = orders(name, pp, virtual, micros)
            kinds = [Kind.FORWARD, Kind.INPUT, Kind.WEIGHT] if name == "zero_bubble" else [Kind.FORWARD, Kind.BACKWARD]
            every = {Action(k, s, m) for k in kinds for s in range(pp * virtual) for m in range(micros)}
            flat = [action for order in made for action in order]
            assert len(flat) == len(every) and set(flat) == every
            assert all(action.stage % pp == rank for rank, order in enumerate(made) for action in order)
            simulate(made, unit(virtual))
            for rank, order in enumerate(made):
                kept = most = 0
                for action in order:
                    kept += {Kind.FORWARD: 1, Kind.WEIGHT: 0}.get(action.kind, -1)
                    most = max(most, kept)
                assert most <= (micros if name == "gpipe" else most_in_flight(pp, virtual, rank))


@pytest.mark.parametrize(("pp", "micros"), [(2, 4), (3, 6), (4, 8), (4, 16), (8, 32)])
def test_spans_are_those_of_the_papers(pp, micros):
    ideal, warm_up = 3.0 * micros, 3.0 * (pp - 1)

    def span(name, virtual=1):
        return simulate(orders(name, pp, virtual, micros), unit(virtual)).span

    assert span("gpipe") == span("1f1b") == ideal + warm_up
    assert span("interleaved", 2) == pytest.approx(ideal + warm_up / 2)
    # ZB-H1: (pp - 1) * (forward + input - weight); list scheduling comes within two units of it.
    assert ideal + warm_up / 3 <= span("zero_bubble") <= ideal + warm_up / 3 + 2 < ideal + warm_up + 0.1


def test_a_slow_link_lengthens_the_step():
    made = orders("1f1b", 2, 1, 4)
    assert simulate(made, unit(1), message=0.5).span > simulate(made, unit(1)).span


def test_orders_that_wait_for_one_another_are_found():
    first, second = orders("1f1b", 2, 1, 2)
    with pytest.raises(Deadlock, match=r"B0.0, F1.1 wait"):
        simulate((first[::-1], second[::-1]), unit(1))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("zigzag", 2, 1, 2), "no pipeline schedule"),
        (("1f1b", 2, 2, 2), "one stage"),
        (("gpipe", 0, 1, 1), "at least 1"),
    ],
)
def test_what_there_is_no_schedule_for(arguments, why):
    with pytest.raises(ValueError, match=why):
        orders(*arguments)
