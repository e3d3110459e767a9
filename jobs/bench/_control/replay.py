"""Replay a trace against a fleet, and what that cost."""

from __future__ import annotations

import gc
import math
import statistics
import time
import tracemalloc
from typing import Any

from _control.fleet import STEP_S, Fleet
from _control.traces import trace


def replay(name: str, machines: int, per_machine: int, faults: int, seconds: float, seed: int) -> dict[str, Any]:
    """One row: milliseconds per decision, plan and policy, and events per second."""
    fleet = Fleet(machines, per_machine, seed)
    fleet.watch.laps.clear()  # the start of the job is no decision
    events = trace(name, machines, faults, seconds, seed)
    gc.collect()
    began = time.perf_counter()
    heard = _run(fleet, events, seconds)
    took = time.perf_counter() - began
    laps = fleet.watch.laps
    rounds = len(laps["decision"])
    return {
        "trace": name,
        "seed": seed,
        "faults": len(events),
        "rounds": rounds,
        "ms": {key: summary(values) for key, values in laps.items()},
        # What the simulation itself takes to make the words up is in the time: a lower bound.
        "events_per_s": (heard + len(events)) / took,
        "seconds": took,
        "books": fleet.books(),
    }


def _run(fleet: Fleet, events: list[Any], seconds: float) -> int:
    """Faults when their time comes, a step of training in between; returns the words heard."""
    heard, at = 0, 0
    while fleet.now < seconds:
        until = fleet.now + STEP_S
        while at < len(events) and events[at].at < until:
            fleet.take(events[at])
            at += 1
        fleet.now = until - STEP_S
        heard += len(fleet.words)
        fleet.tick()
    return heard


def memory(machines: int, per_machine: int, faults: int, seconds: float, seed: int) -> dict[str, Any]:
    """One row: MiB of Python objects that the books take, at the start and after a trace; and per event."""
    tracemalloc.start()
    try:
        fleet = Fleet(machines, per_machine, seed)
        events = trace("random", machines, faults, seconds, seed)
        fleet.tick()
        before = _held()
        _run(fleet, events, seconds)
        fleet.watch.laps.clear()
        after = _held()
        peak = tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()
    return {"trace": "memory", "faults": len(events), "start_mib": before, "end_mib": after, "peak_mib": peak}


def _held() -> float:
    gc.collect()
    return tracemalloc.get_traced_memory()[0] / 2**20


def summary(seconds: list[float]) -> dict[str, float]:
    """Number, median, 99th percentile and maximum, in milliseconds."""
    ordered = sorted(seconds)
    return {
        "count": len(ordered),
        "p50": 1e3 * statistics.median(ordered),
        "p99": 1e3 * percentile(ordered, 0.99),
        "max": 1e3 * ordered[-1],
    }


def percentile(ordered: list[float], share: float) -> float:
    """Nearest rank: the least value that is not exceeded by ``share`` of all; ``ordered`` is sorted, not empty."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
