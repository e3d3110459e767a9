"""The arithmetic of the report: scales, ticks, reduction, rates, phases, accounts."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.observe.goodput import CLASSES, RECOVERY
from planaria.observe.report.accounts import lost_s, total
from planaria.observe.report.curves import workers
from planaria.observe.report.episodes import UNKNOWN, by_phase, recovery, spans
from planaria.observe.report.reduce import envelope, finite_runs, last_of_each, rates
from planaria.observe.report.scales import Scale, ticks, time_label, time_ticks

NUMBERS = st.floats(-1e9, 1e9, allow_nan=False)
SPANS_S = st.floats(0, 1e6, allow_nan=False)


@given(NUMBERS, NUMBERS, NUMBERS)
def test_a_scale_stays_on_the_drawing(low: float, high: float, value: float) -> None:
    place = Scale(low, high, 10.0, 110.0)(value)
    assert 10.0 <= place <= 110.0
    if high > low:
        assert Scale(low, high, 10.0, 110.0)(low) == 10.0
        assert Scale(low, high, 10.0, 110.0)(high) == pytest.approx(110.0)


@given(NUMBERS, st.floats(1e-6, 1e9), st.integers(2, 10))
def test_ticks_are_within_and_few(low: float, span: float, wanted: int) -> None:
    high = low + span
    found = ticks(low, high, wanted)
    assert 1 <= len(found) <= wanted + 1
    slack = 1e-6 * max(span, 1e-9 * abs(low))
    assert all(low - slack <= mark <= high + slack for mark in found)
    assert found == sorted(set(found))


def test_ticks_are_round() -> None:
    assert ticks(0.0, 6.1, 4) == [0.0, 2.0, 4.0, 6.0]
    assert ticks(5.2, 5.9, 4) == [5.2, 5.4, 5.6, 5.8]
    assert ticks(3.0, 3.0) == [3.0]


@given(st.floats(1e-3, 1e9), st.integers(2, 10))
def test_marks_of_time_are_within_and_few(seconds: float, wanted: int) -> None:
    found = time_ticks(seconds, wanted)
    assert found[0] == 0.0 and len(found) <= wanted + 1 and found[-1] <= seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    "seconds, words",
    [(139, "30 s"), (600, "2 min"), (3600 * 5, "1 h"), (86400 * 3, "1 d"), (0.9, "0.2 s"), (5400, "30 min")],
)
def test_marks_of_time_are_written_in_whole_units(seconds: float, words: str) -> None:
    places = time_ticks(seconds, 5)
    assert time_label(places)(places[1]) == words


@given(st.lists(NUMBERS, min_size=1, max_size=400), st.integers(1, 30))
def test_reduction_keeps_every_columns_extremes(values: list[float], columns: int) -> None:
    x, y = np.arange(len(values), dtype=np.float64), np.array(values)
    kept = envelope(x, y, columns)
    assert list(kept) == sorted(set(kept)) and len(kept) <= max(4 * columns, 1)
    assert kept[0] == 0 and kept[-1] == len(x) - 1
    if len(x) > 4 * columns:
        column = np.minimum((x - x[0]) / (x[-1] - x[0]) * columns, columns - 1).astype(int)
        for number in set(column):
            there, left = y[column == number], y[kept[column[kept] == number]]
            assert (there.min(), there.max()) == (left.min(), left.max())
            assert (there[0], there[-1]) == (left[0], left[-1])


@given(st.lists(st.integers(0, 20), max_size=60))
def test_a_redone_step_counts_as_executed_last(steps: list[int]) -> None:
    expected = {step: at for at, step in enumerate(steps)}
    assert list(last_of_each(np.array(steps, np.int64))) == [expected[step] for step in sorted(expected)]


@given(st.lists(st.sampled_from([1.0, 2.0, math.nan, math.inf]), max_size=30))
def test_curves_break_where_there_is_no_number(values: list[float]) -> None:
    found = finite_runs(np.array(values))
    inside = {at for begin, end in found for at in range(begin, end)}
    assert inside == {at for at, value in enumerate(values) if math.isfinite(value)}
    assert all(later[0] > earlier[1] for earlier, later in itertools.pairwise(found))


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 5) | st.just(math.nan)), min_size=1, max_size=80))
def test_rates_add_up_to_the_steps(gaps: list[tuple[float, float]]) -> None:
    ends = np.cumsum([gap for gap, _ in gaps]) + 1.0
    edges, values = rates(ends, np.array([took for _, took in gaps]), float(ends[-1]) + 3.0, most=20)
    assert (values >= -1e-9).all() and len(edges) == len(values) + 1 <= 21
    assert float(np.sum(values * np.diff(edges))) == pytest.approx(len(gaps))


def test_nothing_is_done_while_nothing_happens() -> None:
    ends = np.concatenate([np.arange(1, 9) / 2, np.arange(17, 21) / 2])  # none from 4 s to 8 s
    edges, values = rates(ends, np.full(12, 0.5), 10.0, most=10, each=1)
    assert list(edges) == list(range(11))
    assert list(values) == [2.0] * 4 + [0.0] * 4 + [2.0] * 2


@given(st.dictionaries(st.sampled_from(RECOVERY), SPANS_S), SPANS_S, SPANS_S)
def test_phases_add_up_to_the_recovery(phases: dict[str, float], seconds: float, detect_s: float) -> None:
    phases.pop("detect", None)
    found = recovery(phases, seconds, detect_s)
    assert found.seconds == pytest.approx(seconds + detect_s)
    assert sum(found.phases.values()) == pytest.approx(found.seconds, abs=1e-9)
    assert all(value > 0 for value in found.phases.values())
    order = [*RECOVERY, UNKNOWN]
    assert [order.index(name) for name in found.phases] == sorted(order.index(name) for name in found.phases)


def test_phases_that_are_not_told_are_not_invented() -> None:
    assert recovery(None, 2.0).phases == {UNKNOWN: 2.0}
    assert recovery({"abort": 0.5}, None, 3.0).seconds is None
    assert recovery({"abort": 5.0, "plan": 1.0}, 2.0).phases == {"abort": 2.0}
    done = [recovery({"abort": 1.0}, 2.0), recovery({"abort": 3.0}, 4.0), recovery({}, None)]
    assert by_phase(done) == [("abort", 2.0, 3.0, 4.0), ("first_step", 1.0, 1.0, 2.0)]


def row(event: str, at: float, **fields: object) -> dict[str, object]:
    return {"event": event, "time": at, **fields}


def test_generations_of_two_submissions() -> None:
    events = [
        row("generation", 10.0, gen=1, cause="start", workers=["a", "b"], layout="dp2", step=0, source="start"),
        row("generation", 20.0, gen=2, cause="lost b", planned=False, detect_s=1.5, workers=["a"], step=7),
        row("generation", 22.0, gen=3, cause="lost c", planned=False, workers=["a"], step=7),
        row("recovered", 25.0, gen=3, seconds=3.5, phases={"plan": 0.5}),
        row("generation", 30.0, gen=4, cause="resize", planned=True, workers=["a", "d"], step=9),
        row("recovered", 31.0, gen=4, seconds=1.0, phases={"plan": 0.5}),
        row("state", 40.0, to="stopped"),
        row("generation", 110.0, gen=1, cause="start", planned=True, workers=["x"], step=12, source="checkpoint"),
    ]
    found = spans(events, [5.0, 100.0], 120.0)
    assert [(s.attempt, s.number, s.began, s.ended) for s in found] == [
        (1, 1, 10.0, 20.0),
        (1, 2, 20.0, 22.0),
        (1, 3, 22.0, 30.0),
        (1, 4, 30.0, 40.0),
        (2, 1, 110.0, 120.0),
    ]
    assert [s.fault for s in found] == [False, True, True, False, False]
    took = [s.recovery and (s.recovery.seconds, s.recovery.phases) for s in found]
    assert took[0] is None and took[4] is None
    assert took[1] == (None, {"detect": 1.5})
    assert took[2] == (3.5, {"plan": 0.5, "first_step": 3.0})
    edges, counts = workers(found, 0.0)
    assert list(edges) == [0.0, 10.0, 20.0, 22.0, 30.0, 40.0, 110.0, 120.0]
    assert list(counts) == [0.0, 2.0, 1.0, 1.0, 2.0, 0.0, 1.0]


def account(wall: float, productive: float, **more: float) -> dict[str, float]:
    spent = dict.fromkeys(CLASSES, 0.0) | {"productive": productive, "other": wall - productive}
    return spent | {"wall": wall, "goodput": productive / wall} | more


def test_accounts_of_submissions_are_added_up() -> None:
    rows = [
        account(10.0, 5.0, time=12.0),
        account(20.0, 14.0, time=22.0),  # the newest of the first submission
        account(8.0, 1.0, time=110.0),
        account(30.0, 20.0),  # the closing one has no time
    ]
    found = total(rows, [0.0, 100.0])
    assert found is not None and (found["wall"], found["productive"]) == (50.0, 34.0)
    assert found["goodput"] == pytest.approx(0.68) and lost_s(found) == pytest.approx(16.0)
    assert total([], [0.0]) is None


def test_an_account_that_began_anew_is_added_too() -> None:
    rows = [account(20.0, 14.0, time=22.0), account(3.0, 1.0, time=30.0)]
    found = total(rows, [0.0])
    assert found is not None and found["wall"] == pytest.approx(23.0)
