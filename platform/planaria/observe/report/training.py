"""What was learned and how fast: loss, time per step, throughput."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from planaria.observe.ranks import FIELDS
from planaria.observe.report.bars import rank_bars
from planaria.observe.report.curves import over_steps, over_time
from planaria.observe.report.episodes import Span
from planaria.observe.report.history import History, Row, Steps
from planaria.observe.report.parts import Figure, Section, Table, count, figure
from planaria.observe.report.reduce import last_of_each, rates
from planaria.observe.text import duration, number, quantity

SAMPLED = 24
"""Steps in the table beside a curve."""
MOST_RANKS = 64
"""Ranks in the chart."""


def counted(history: History) -> Steps:
    """Each step as it was executed last: what the run is made of."""
    return history.steps.at(last_of_each(history.steps.step))


def training(history: History, spans: Sequence[Span]) -> Section:
    """Loss over steps, generations marked."""
    steps = counted(history)
    says = []
    if not len(steps):
        return Section("training", "Training", ["No step was completed."])
    redone, odd = len(history.steps) - len(steps), int(np.sum(~np.isfinite(steps["loss"])))
    if redone:
        says.append(f"{count(redone, 'step')} had to be done again; each is shown once, as executed last.")
    if skipped := int(steps.skipped.sum()):
        says.append(f"{count(skipped, 'step')} changed nothing, since the gradient was not finite.")
    if odd:
        says.append(f"The loss of {count(odd, 'step')} was no number: there the curve has a gap.")
    numbers = (steps.step + 1).astype(np.float64)
    loss = steps["loss"]
    known = loss[np.isfinite(loss)]
    text = "No loss was recorded."
    if len(known):
        text = (
            f"Loss from {number(float(known[0]))} to {number(float(known[-1]))} over {count(len(steps), 'step')}, "
            f"between {number(float(known.min()))} and {number(float(known.max()))}; "
            f"{count(len(spans), 'generation')}. Every column of pixels keeps its smallest and largest value."
        )
    legend = [("curve a", "loss")]
    legend += [("faultline", "a fault")] if any(span.fault for span in spans) else []
    planned = any(span.recovery is not None and not span.fault for span in spans)
    legend += [("changeline", "a planned change")] if planned else []
    draw = partial(over_steps, steps=numbers, curves=[("a", loss)], y_label="loss", spans=spans)
    figures = figure("loss", "Loss", text, draw, legend, _sampled(steps))
    waits, times = steps["data_wait_s"], steps["step_s"]
    if np.isfinite(times).any():
        usual = float(np.nanmedian(times))
        wait = f", of which {duration(float(np.nanmedian(waits)))} waiting for data" if np.isfinite(waits).any() else ""
        text = f"Time per step by the first rank's clock: median {duration(usual)}{wait}."
        draw = partial(
            over_steps, steps=numbers, curves=[("a", times), ("b", waits)], y_label="seconds", from_zero=True
        )
        figures += figure("step", "Time per step", text, draw, [("curve a", "whole step"), ("curve b", "data wait")])
    return Section("training", "Training", says, figures)


def throughput(history: History) -> Section:
    """Samples per second over the wall time, and what every rank did."""
    steps = counted(history)
    batch = history.job.get("train", {}).get("global_batch") if isinstance(history.job.get("train"), dict) else None
    size, unit = (batch, "samples") if isinstance(batch, int) and batch > 0 else (1, "steps")
    span = max(history.ended - history.began, 0.0)
    order = np.argsort(steps["time"], kind="stable")
    edges, values = rates(steps["time"][order] - history.began, steps["step_s"][order], span, most=240)
    figures: list[Figure] = []
    if len(values):
        mean, best = quantity(len(steps) * size / span), quantity(float(values.max()) * size)
        text = (
            f"{unit.capitalize()} per second that count, over the whole wall time: {mean} on average, {best} at best. "
        )
        text += "Start-up, recoveries and waiting are in it."
        draw = partial(over_time, edges=edges, values=values * size, y_label=f"{unit}/s")
        figures = figure("rate", f"{unit.capitalize()} per second", text, draw)
    return Section("throughput", "Throughput", figures=figures + _ranks(history.ranks))


def _ranks(rows: Sequence[Row]) -> list[Figure]:
    """What the ranks of the newest generation did: their own share of the work, and the time it took them."""
    if not rows:
        return []
    newest = [row for row in rows if row.get("gen") == rows[-1].get("gen")]
    sums: dict[int, list[float]] = {}
    for row in newest:
        for rank, told in row["ranks"].items():
            if isinstance(told, list) and len(told) == FIELDS and str(rank).isdigit():
                held = sums.setdefault(int(rank), [0.0] * FIELDS)
                sums[int(rank)] = [a + float(b) for a, b in zip(held, told, strict=True)]
    bars, cells = [], []
    for rank, (steps, measured, computed, waited, samples) in sorted(sums.items()):
        if steps and measured:
            each = computed / measured
            bars.append((f"rank {rank}", each, f"{duration(each)} per step"))
            speed = quantity(samples / steps / each) if each else "-"
            cells.append(
                (str(rank), f"{steps:.0f}", duration(each), duration(waited / steps), f"{samples:,.0f}", speed)
            )
    if not bars:
        return []
    table = Table(
        "Ranks in numbers",
        ("rank", "steps", "computing, per step", "data wait, per step", "samples", "samples per second of computing"),
        cells,
        frozenset(range(6)),
        folded=True,
    )
    slowest = max(bars, key=lambda item: item[1])
    text = f"Time that each rank of generation {rows[-1].get('gen')} computed per step; the slowest is {slowest[0]}, "
    text += f"with {slowest[2]}."
    shown = bars
    if len(bars) > MOST_RANKS:
        shown = sorted(bars, key=lambda item: -item[1])[:MOST_RANKS]
        text += f" The {MOST_RANKS} slowest are drawn."
    return figure("ranks", "Ranks", text, partial(rank_bars, rows=shown), table=table)


def _sampled(steps: Steps) -> Table:
    chosen = np.unique(np.linspace(0, len(steps) - 1, min(SAMPLED, len(steps))).astype(np.int64))
    rows = []
    for at in chosen:
        cells = [f"{steps.step[at] + 1}", str(steps.generation[at])]
        cells += [_cell(float(steps[name][at])) for name in ("loss", "grad_norm", "lr")]
        rows.append([*cells, duration(float(steps["step_s"][at]))])
    columns = ("step", "generation", "loss", "gradient norm", "learning rate", "time")
    return Table(f"Loss in numbers ({len(rows)} of {len(steps):,} steps)", columns, rows, frozenset(range(6)), True)


def _cell(value: float) -> str:
    return number(value) if np.isfinite(value) else "-"
