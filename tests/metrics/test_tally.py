"""Counters from the records of a run: through a recovery, a planned change, and the return of the controller."""

from __future__ import annotations

import math
from typing import Any

import pytest

from planaria.metrics.book import Book, Histogram, Series
from planaria.metrics.catalogue import CATALOGUE
from planaria.metrics.tally import Tally

Rows = list[tuple[str, dict[str, Any]]]


def event(kind: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "events", {"time": 100.0, "event": kind, "text": kind, **fields}


def generation(number: int, step: int, cause: str, *, planned: bool = False) -> tuple[str, dict[str, Any]]:
    return event("generation", gen=number, step=step, cause=cause, planned=planned, detect_s=0.25)


def step(number: int, **fields: Any) -> tuple[str, dict[str, Any]]:
    row = {"time": 50.0 + number, "step": number, "loss": 2.0, "grad_norm": 1.0, "lr": 0.1, "targets": 7}
    row |= {"skipped": False, "overflow": False, "loss_scale": None, "step_s": 0.3, "snapshot_s": 0.01}
    return "metrics", row | {"complete": number, "phase_s": {"data": 0.1, "step": 0.2}, "wire_bytes": 8} | fields


def consumed(count: int) -> tuple[str, dict[str, Any]]:
    return "ledger", {"step": 0, "gen": 1, "ids": list(range(count)), "tokens": 10 * count}


RUN: Rows = [
    generation(1, 0, "start", planned=True),
    step(0),
    consumed(4),
    step(1, skipped=True, loss=3.0),
    consumed(4),
    event("bad_sample", key="a", reason="truncated"),
    event("checkpoint", step=1, took_s=0.4, nbytes=1000),
    event("lost", member="worker-1", node="n1"),
    event("lost", member="seat-1", node="n1"),
    event("fault", gen=1),
    generation(2, 1, "worker-1: its process ended"),
    event("rollback", gen=2, steps_lost=1),
    step(1),
    event("recovered", gen=2, seconds=0.9, phases={"plan": 0.1, "first_step": 0.8}),
    event("resize", gen=2),
    generation(3, 2, "resize", planned=True),
    event("recovered", gen=3, seconds=0.5, phases={"plan": 0.1}),
    event("unreplicated", owner="worker-0"),
]


def counted(rows: Rows) -> tuple[Book, Tally]:
    book = Book()
    tally = Tally(book)
    for name, row in rows:
        tally.take(name, row)
    return book, tally


for _at, (_, _row) in enumerate(RUN):
    _row["time"] = float(_at)


def one(values: Series, name: str, *labels: str) -> Any:
    return values[f"planaria_{name}"][labels]


def test_what_a_run_with_a_recovery_counts() -> None:
    book, tally = counted(RUN)
    values = book.values()
    assert one(values, "steps_total") == 3
    assert one(values, "steps_undone_total") == 1
    assert one(values, "skipped_steps_total", "not_finite") == 1
    assert one(values, "samples_total") == 8
    assert one(values, "tokens_total") == 80
    assert one(values, "target_tokens_total") == 21
    assert one(values, "wire_bytes_total") == 24
    assert one(values, "faults_total") == one(values, "recoveries_total", "lost") == 1
    assert one(values, "recoveries_total", "hang") == 0
    assert one(values, "resizes_total", "resize") == 1
    assert one(values, "processes_lost_total", "worker") == 1
    assert one(values, "bad_samples_total", "truncated") == 1
    assert one(values, "checkpoint_bytes_total") == 1000
    assert one(values, "snapshot_failures_total", "unreplicated") == 1
    assert one(values, "step") == 2
    assert one(values, "loss") == 2.0
    assert tally.checkpoint_at == 6.0


def test_phases_of_a_recovery_add_up_to_the_whole() -> None:
    values = counted(RUN)[0].values()
    seconds = {labels[0]: found.total for labels, found in values["planaria_recovery_seconds"].items()}  # type: ignore[union-attr]
    assert seconds["whole"] == pytest.approx(sum(seconds.values()) - seconds["whole"])
    assert seconds["detect"] == 0.25


def test_a_histogram_counts_an_observation_on_a_bound_below_it() -> None:
    values = counted([step(0, step_s=0.25)])[0].values()
    found = one(values, "step_seconds", "whole")
    assert isinstance(found, Histogram)
    at = CATALOGUE["planaria_step_seconds"].buckets.index(0.25)
    assert found.counts[at] == sum(found.counts) == 1


@pytest.mark.parametrize("kind", ["hang", "error", "replicas_differ", "rewind"])
def test_the_cause_of_a_recovery_is_what_was_found(kind: str) -> None:
    fault = [event(kind, gen=1), event("lost", member="worker-1", node="n"), event("fault", gen=1)]
    again = event("recovered", gen=2, seconds=1.0, phases={})
    values = counted([*fault, generation(2, 0, "whatever it said"), again])[0].values()
    causes = {labels[0] for labels, number in values["planaria_recoveries_total"].items() if number}
    assert causes == {{"replicas_differ": "replicas", "rewind": "numerics"}.get(kind, kind)}


def test_going_back_from_wrong_numbers_is_no_planned_change() -> None:
    rows = [event("resize", gen=1), event("rewind", to_step=0), generation(2, 0, "resize", planned=True)]
    values = counted([*rows, event("recovered", gen=2, seconds=1.0, phases={})])[0].values()
    assert one(values, "recoveries_total", "numerics") == 1
    assert one(values, "resizes_total", "resize") == 0


@pytest.mark.parametrize("lost_after", range(len(RUN) + 1))
def test_a_controller_that_returns_goes_on_where_the_records_end(lost_after: int) -> None:
    """Whenever it is lost: its second life counts the rows again, and nothing has gone back."""
    before = counted(RUN[:lost_after])[0].values()
    book = Book()
    tally = Tally(book)
    tally.take("events", event("joined")[1])
    tally.take("events", event("fault", gen=0)[1])  # of this life, and on record by the time of the replay
    rows: dict[str, list[dict[str, Any]]] = {"events": [], "metrics": [], "ledger": []}
    for name, row in RUN[:lost_after]:
        rows[name].append(row)
    tally.replay(rows)
    after = book.values()
    assert after == before
    for name, row in RUN[lost_after:]:
        tally.take(name, row)
    assert book.values() == counted(RUN)[0].values()


def test_a_metric_that_the_catalogue_lacks_is_refused() -> None:
    book = Book()
    with pytest.raises(KeyError):
        book.inc("nonsense_total")
    with pytest.raises(KeyError, match="labels"):
        book.inc("faults_total", rank="0")
    with pytest.raises(ValueError, match="cannot grow"):
        book.inc("faults_total", -1)


def test_a_loss_that_is_not_finite_is_shown_as_such() -> None:
    values = counted([step(0, loss=None)])[0].values()
    assert math.isnan(one(values, "loss"))
