"""Generations, and what came between them, from the events of a run: plain reading, no clock and no file."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from planaria.observe.goodput import RECOVERY
from planaria.observe.text import cause as in_words

Row = Mapping[str, Any]
PLANNED = ("start", "resize", "drain", "straggler")
"""Causes of generations that no fault was behind; needed for records that do not say ``planned``."""
UNKNOWN = "unknown"
"""The phase of time that no phase was recorded for."""


@dataclass(frozen=True)
class Recovery:
    """From a fault, or a planned change, to the first new step."""

    seconds: float | None
    """All of it, detection included; None: no step came of it (yet)."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds by phase, in the order in which they passed; they add up to ``seconds``."""


@dataclass(frozen=True)
class Span:
    """One generation, as long as it lasted. Times are ``time.time()``."""

    attempt: int
    """Which submission it belongs to, from 1."""
    number: int
    layout: str
    workers: int
    spares: int
    cause: str
    """For a person."""
    fault: bool
    """Whether a fault ended the one before."""
    source: str
    """Where its state came from: memory, the checkpoint of a step, or nowhere (the start)."""
    began: float
    ended: float
    step: int
    """Completed steps that it went on from."""
    recovery: Recovery | None
    """What it took to get there; None for the first of a submission."""


def spans(events: Sequence[Row], starts: Sequence[float], end: float) -> list[Span]:
    """The generations of all submissions, in order.

    Args:
        events: rows with ``event`` and ``time``.
        starts: when each submission began.
        end: when the last line was written: the end of the last generation.
    """
    found: list[Span] = []
    over: float | None = None
    for row in events:
        match row["event"]:
            case "state" if row.get("to") in ("finished", "stopped", "failed"):
                over = row["time"]
            case "generation":
                attempt = max(1, bisect_right(starts, row["time"]))
                if found:
                    found[-1] = replace(found[-1], ended=over if over is not None else row["time"])
                first = not found or found[-1].attempt != attempt
                detect_s = _seconds(row.get("detect_s"))
                found.append(_span(row, attempt, None if first else recovery(None, None, detect_s or 0.0)))
                over = None
            case "recovered":
                for at, span in reversed(list(enumerate(found))):
                    if span.number == row.get("gen"):
                        early = span.recovery.phases.get("detect", 0.0) if span.recovery else 0.0
                        found[at] = replace(span, recovery=recovery(row.get("phases"), row.get("seconds"), early))
                        break
    if found:
        found[-1] = replace(found[-1], ended=max(found[-1].began, over if over is not None else end))
    return found


def recovery(phases: Any, seconds: Any, detect_s: float = 0.0) -> Recovery:
    """What a ``recovered`` event says, its phases laid end to end.

    Every phase is the longest over the ranks, so that together they may exceed the whole; what does not fit is cut
    off, as in the account of wall time. Time beyond the phases belongs to the first step, or, if no phase is known at
    all, to :data:`UNKNOWN`.

    Args:
        phases: seconds by phase, from the evidence of the fault on; anything else counts as nothing.
        seconds: from the evidence to the first step; not a number: not known.
        detect_s: from the last sign of life of who was lost to the evidence.
    """
    whole = _seconds(seconds)
    if whole is None:
        return Recovery(None, {"detect": detect_s} if detect_s else {})
    known = {name: _seconds(value) or 0.0 for name, value in phases.items()} if isinstance(phases, Mapping) else {}
    left, laid = whole, {"detect": detect_s} if detect_s > 0 else {}
    for name in RECOVERY:
        if name in known and name != "first_step":
            laid[name] = min(known[name], left)
            left -= laid[name]
    if left > 0:
        laid["first_step" if known else UNKNOWN] = left
    return Recovery(detect_s + whole, {name: value for name, value in laid.items() if value > 0})


def by_phase(recoveries: Iterable[Recovery]) -> list[tuple[str, float, float, float]]:
    """(phase, median, largest, sum) in seconds over the recoveries that ended, a phase that was not there as 0."""
    done = [item for item in recoveries if item.seconds is not None]
    names = [name for name in (*RECOVERY, UNKNOWN) if any(name in item.phases for item in done)]
    rows = []
    for name in names:
        values = [item.phases.get(name, 0.0) for item in done]
        rows.append((name, statistics.median(values), max(values), sum(values)))
    return rows


def _span(row: Row, attempt: int, came: Recovery | None) -> Span:
    cause = str(row.get("cause", "-"))
    return Span(
        attempt=attempt,
        number=row["gen"] if isinstance(row.get("gen"), int) else 0,
        layout=str(row.get("layout", "-")),
        workers=len(row.get("workers") or ()),
        spares=len(row.get("spares") or ()),
        cause=in_words(cause),
        fault=came is not None and not row.get("planned", cause in PLANNED),
        source=str(row.get("source", "-")),
        began=row["time"],
        ended=row["time"],
        step=row["step"] if isinstance(row.get("step"), int) else 0,
        recovery=came,
    )


def _seconds(value: Any) -> float | None:
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 and value < float("inf")
    return float(value) if known else None
