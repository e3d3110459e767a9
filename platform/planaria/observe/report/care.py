"""What the run was careful about: checkpoints, copies in memory, damaged data, odd numbers."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Sequence

import numpy as np

from planaria.observe.report.episodes import Span
from planaria.observe.report.history import History, Row
from planaria.observe.report.parts import Section, Table, count
from planaria.observe.report.training import counted
from planaria.observe.text import duration

MOST_CAUSES = 12


def checkpoints(history: History, spans: Sequence[Span]) -> Section:
    """Snapshots in memory and durable checkpoints."""
    durable = history.kind("checkpoint")
    facts = {"durable checkpoints": f"{len(durable)}"}
    if durable:
        newest = durable[-1]
        facts["newest"] = f"step {newest.get('step', '-')}, {duration(max(0.0, history.ended - newest['time']))} "
        facts["newest"] += "before the last line of the record"
        took = [float(row["took_s"]) for row in durable if isinstance(row.get("took_s"), (int, float))]
        if took:
            facts["from snapshot to durable"] = (
                f"median {duration(statistics.median(took))}, longest {duration(max(took))}"
            )
    for kind, name in (
        ("checkpoint_failed", "failed"),
        ("checkpoint_skipped", "left out, the one before being under way"),
        ("checkpoint_damaged", "found damaged"),
    ):
        if rows := history.kind(kind):
            facts[name] = f"{len(rows)}; last: {rows[-1].get('text', '-')}"
    kept = history.steps["snapshot_s"]
    if np.isfinite(kept).any():
        facts["snapshot in memory, per step"] = (
            f"median {duration(float(np.nanmedian(kept)))}, longest {duration(float(np.nanmax(kept)))}"
        )
    sources = Counter(span.source for span in spans if span.recovery is not None)
    if sources:
        names = {"memory": "memory", "checkpoint": "a checkpoint", "start": "the initial weights"}
        facts["state after a fault or change came from"] = ", ".join(
            f"{names.get(name, name)} {number}x" for name, number in sources.most_common()
        )
    for kind, name in (
        ("unreplicated", "snapshots without a copy on another node"),
        ("memory_damaged", "damaged snapshots"),
        ("memory_short", "too little shared memory"),
    ):
        if rows := history.kind(kind):
            facts[name] = f"{len(rows)}; last: {rows[-1].get('text', '-')}"
    return Section("checkpoints", "Checkpoints", facts=facts)


def data(history: History) -> Section:
    """Samples that were replaced, by reason, and how long training waited for data."""
    bad = history.kind("bad_sample")
    facts = {"damaged samples": f"{len(bad):,}, each replaced by another" if bad else "none"}
    steps = counted(history)
    batch = history.job.get("train", {}).get("global_batch") if isinstance(history.job.get("train"), dict) else None
    if isinstance(batch, int) and batch > 0 and len(steps):
        facts["share of samples read"] = f"{100 * len(bad) / (len(steps) * batch + len(bad)):.3g}%"
    waited, took = steps["data_wait_s"], steps["step_s"]
    if np.nansum(took) > 0:
        facts["waiting for data"] = f"{100 * np.nansum(waited) / np.nansum(took):.1f}% of the time of steps"
    if skipped := int(steps.skipped.sum()):
        facts["steps without a finite gradient"] = f"{skipped:,}"
    for kind, name in (("rewind", "batches left out"), ("rollback", "rollbacks")):
        if rows := history.kind(kind):
            facts[name] = f"{len(rows)}; last: {rows[-1].get('text', '-')}"
    lost = sum(str(row.get("member", "")).startswith("loader") for row in history.kind("lost"))
    if lost:
        facts["loaders lost"] = str(lost)
    tables = []
    if bad:
        reasons = Counter(_reason(row) for row in bad)
        table = [[reason, f"{number:,}"] for reason, number in reasons.most_common(MOST_CAUSES)]
        rest = len(bad) - sum(number for _, number in reasons.most_common(MOST_CAUSES))
        table += [["others", f"{rest:,}"]] if rest else []
        tables.append(Table("Replaced samples by reason", ("reason", "samples"), table, frozenset({1})))
        last = [[str(row.get("key", "-")), str(row.get("cause", row.get("text", "-")))] for row in bad[-MOST_CAUSES:]]
        tables.append(Table(f"The last {count(len(last), 'sample')} replaced", ("sample", "why"), last, folded=True))
    return Section("data", "Data health", tables=tables, facts=facts)


def _reason(row: Row) -> str:
    """The cause without the numbers that differ from sample to sample."""
    cause = str(row.get("reason") or row.get("cause") or row.get("text") or "unknown")
    return re.sub(r"(?<![\w-])(0x[0-9a-fA-F]+|\d+)", "N", cause)[:160]
