"""What the records of a run say, counted: a fold over their rows, one after the other. Pure.

The same rows give the same values, so that a controller that was lost and has returned counts what is on record once
more and goes on from there: no counter ever goes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from planaria.metrics.book import Book
from planaria.metrics.catalogue import MEMORY_TROUBLES, RESIZE_CAUSES, STEP_PHASES, WHOLE, metric

Row = Mapping[str, Any]
RECORDS = ("events", "metrics", "ledger")
"""The records that are counted, as :class:`planaria.observe.record.RunRecord` names them."""

EVIDENCE = {"hang": "hang", "error": "error", "replicas_differ": "replicas", "rewind": "numerics"}
"""What an event says of the fault that follows or has just been; without any, a member was lost."""
COUNTED = {
    "fault": "faults_total",
    "hang": "hangs_total",
    "straggler": "stragglers_total",
    "quarantined": "quarantines_total",
    "returned": "controller_returns_total",
    "replicas_differ": "replica_mismatches_total",
    "checkpoint_failed": "checkpoint_failures_total",
    "checkpoint_skipped": "checkpoints_skipped_total",
}
"""Events whose number is all that counts."""


class Tally:
    """Counts rows into a :class:`Book`."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._kinds = dict(metric("processes_lost_total").values)["kind"]
        self.checkpoint_at: float | None = None
        """When the newest checkpoint became durable, Unix time."""
        self._evidence = "lost"
        self._planned: dict[int, tuple[bool, str, float]] = {}
        """By generation: whether a planned change led to it, the cause, and the seconds until it was known."""

    def replay(self, rows: Mapping[str, Iterable[Row]]) -> None:
        """Forget everything, and count these rows, by record."""
        self._book.clear()
        self._planned, self._evidence, self.checkpoint_at = {}, "lost", None
        both = [(row["time"], name, row) for name in ("events", "metrics") for row in rows.get(name, ())]
        for _, name, row in sorted(both, key=lambda found: found[0]):  # what happened last is what gauges show
            self.take(name, row)
        for row in rows.get("ledger", ()):
            self.take("ledger", row)

    def take(self, name: str, row: Row) -> None:
        """Count one row of a record; those of other records count for nothing."""
        match name:
            case "events":
                self._event(row)
            case "metrics":
                self._step(row)
            case "ledger":
                self._book.inc("samples_total", row["count"] if "count" in row else len(row["ids"]))
                self._book.inc("tokens_total", row.get("tokens") or 0)

    def _event(self, row: Row) -> None:
        kind = row["event"]
        book = self._book
        if kind in EVIDENCE:
            # Replicas that differ are a reason to go back, too.
            self._evidence = "replicas" if self._evidence == "replicas" else EVIDENCE[kind]
        if kind in COUNTED:
            book.inc(COUNTED[kind])
        match kind:
            case "generation":
                # Going back from wrong numbers needs a planned pause, but it undoes a fault.
                planned = row["planned"] and self._evidence == "lost"
                cause = row["cause"] if planned else self._evidence
                self._planned[row["gen"]] = (planned, cause, row.get("detect_s", 0.0))
                self._evidence = "lost"
                book.set("step", row["step"])
                book.drop("snapshot_step")
            case "recovered":
                self._recovered(row)
            case "rollback":
                book.inc("steps_undone_total", max(0, row["steps_lost"]))
            case "lost":
                member = row["member"].rpartition("-")[0]
                if member in self._kinds:
                    book.inc("processes_lost_total", kind=member)
            case "checkpoint":
                book.inc("checkpoints_total")
                book.inc("checkpoint_bytes_total", row.get("nbytes", 0))
                book.observe("checkpoint_seconds", row["took_s"])
                self.checkpoint_at = row["time"]
            case "bad_sample":
                book.inc("bad_samples_total", reason=row.get("reason", "damaged"))
            case trouble if trouble in MEMORY_TROUBLES:
                book.inc("snapshot_failures_total", reason=trouble)

    def _recovered(self, row: Row) -> None:
        planned, cause, detect_s = self._planned.get(row["gen"], (False, "lost", 0.0))
        if planned:
            self._book.inc("resizes_total", cause=cause if cause in RESIZE_CAUSES else "resize")
            self._book.observe("resize_seconds", row["seconds"])
            return
        self._book.inc("recoveries_total", cause=cause)
        self._book.observe("recovery_seconds", row["seconds"] + detect_s, phase=WHOLE)
        for phase, seconds in {"detect": detect_s, **row["phases"]}.items():
            self._book.observe("recovery_seconds", seconds, phase=phase)

    def _step(self, row: Row) -> None:
        book = self._book
        book.inc("steps_total")
        book.inc("target_tokens_total", row["targets"])
        book.inc("wire_bytes_total", row.get("wire_bytes") or 0)
        if row["skipped"]:
            book.inc("skipped_steps_total", reason="overflow" if row["overflow"] else "not_finite")
        book.observe("step_seconds", row["step_s"], phase=WHOLE)
        for phase, seconds in (row.get("phase_s") or {}).items():
            if phase in STEP_PHASES:
                book.observe("step_seconds", seconds, phase=phase)
        book.observe("snapshot_seconds", row["snapshot_s"])
        book.set("step", row["step"] + 1)
        book.set("last_step_timestamp_seconds", row["time"])
        self._gauges(row, book.set)

    def _gauges(self, row: Row, set_to: Callable[[str, float], None]) -> None:
        # A number that is not finite is null on record: NaN is Prometheus' word for it.
        for name, key in (("loss", "loss"), ("gradient_norm", "grad_norm"), ("learning_rate", "lr")):
            set_to(name, float("nan") if row[key] is None else row[key])
        for name, key in (("loss_scale", "loss_scale"), ("snapshot_step", "complete")):
            if row.get(key) is not None:
                set_to(name, row[key])
