"""The record itself: what happened, on what, and how the job was described."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from planaria.observe.report.history import History
from planaria.observe.report.parts import Section, Table, count
from planaria.observe.text import duration

MOST_EVENTS = 600
ROUTINE = ("checkpoint", "joined", "dismissed", "bad_sample", "node_joined", "skipped")
"""What is left out first where there is more than anybody reads."""


def events(history: History) -> Section:
    """Everything that happened, in order; of very long runs what is not routine, the newest first choice."""
    told = [row for row in history.events if row["event"] != "state" and row.get("text")]
    kept, says = told, []
    if len(told) > MOST_EVENTS:
        rare = [row for row in told if row["event"] not in ROUTINE][-MOST_EVENTS:]
        chosen = {id(row) for row in rare}
        common = [row for row in reversed(told) if id(row) not in chosen][: MOST_EVENTS - len(rare)]
        chosen |= {id(row) for row in common}
        kept = [row for row in told if id(row) in chosen]
        says.append(f"{len(kept)} of {len(told):,} events; events.jsonl has all. Routine ones were left out first.")
    rows = []
    for row in kept:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["time"]))
        rows.append([stamp, duration(max(0.0, row["time"] - history.began)), row["event"], str(row["text"])])
    kinds = Counter(row["event"] for row in told)
    caption = f"{count(len(rows), 'event')}, oldest first"
    tables = [Table(caption, ("when", "after", "kind", "what"), rows, frozenset({1}), folded=True)] if rows else []
    facts = {"kinds": ", ".join(f"{kind} {number}" for kind, number in kinds.most_common())} if kinds else {}
    return Section("events", "Events", says or ([] if rows else ["Nothing is on record."]), tables=tables, facts=facts)


def surroundings(history: History) -> Section:
    """Versions and machines, and the job's description with all defaults."""
    facts = {name.replace("_", " "): _value(value) for name, value in leaves(history.environment)}
    config = [[name, _value(value)] for name, value in leaves(history.job)]
    says = [] if facts else ["The surroundings are not on record."]
    says += [] if config else ["The job's description (job.json) is missing."]
    caption = f"Configuration ({count(len(config), 'key')}, defaults included)"
    tables = [Table(caption, ("key", "value"), config, folded=True)] if config else []
    return Section("surroundings", "Environment and configuration", says, tables=tables, facts=facts)


def leaves(tree: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything in a tree that is no mapping; an empty mapping is a value."""
    for key, value in tree.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{name}.")
        else:
            yield name, value


def _value(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(_value(item) for item in value) or "none"
    return str(value)
