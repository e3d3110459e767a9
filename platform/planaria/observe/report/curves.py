"""Charts over steps and over time: loss, time per step, rates, workers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planaria.observe.report.episodes import Span
from planaria.observe.report.reduce import Floats, envelope, finite_runs
from planaria.observe.report.scales import time_label, time_ticks
from planaria.observe.report.svg import LETTER_PX, NARROW, Plot

PAD = 0.05
"""Room above and below a curve, as a share of its span."""


def over_steps(
    ident: str,
    title: str,
    text: str,
    width: int,
    steps: Floats,
    curves: Sequence[tuple[str, Floats]],
    y_label: str,
    spans: Sequence[Span] = (),
    *,
    from_zero: bool = False,
) -> str:
    """Curves over optimizer steps, generations as bands behind them, their beginnings as lines.

    Args:
        steps: ascending; counted from 1.
        curves: (class, values, NaN where there is none), one value per step.
        spans: generations to mark.
        from_zero: whether the vertical axis begins there.

    Returns:
        SVG text; "" if there is nothing to draw.
    """
    values = np.concatenate([curve for _, curve in curves]) if curves else np.zeros(0)
    values = values[np.isfinite(values)]
    if not len(steps) or not len(values):
        return ""
    low, high = (0.0 if from_zero else float(values.min())), float(values.max())
    room = (high - low) * PAD or abs(high) * PAD or 1.0
    plot = Plot(
        ident,
        title,
        text,
        width,
        x=(float(steps[0]), float(steps[-1])),
        y=(low if from_zero else low - room, high + room),
        x_label="optimizer step",
        y_label=y_label,
        above=14 if spans else 0,
        height=260 if spans else 200,
    )
    _bands(plot, spans, float(steps[-1]))
    for name, curve in curves:
        for begin, end in finite_runs(curve):
            x, y = steps[begin:end], curve[begin:end]
            kept = envelope(x, y, int(plot.right - plot.left))
            if len(kept) == 1:
                plot.dot(plot.x(x[0]), plot.y(y[0]), 2.5, f"dot {name}")
            plot.curve(zip(x[kept], y[kept], strict=True), f"curve {name}")
    return plot.markup()


def _bands(plot: Plot, spans: Sequence[Span], last: float) -> None:
    free = plot.left
    for number, span in enumerate(spans):
        begin = plot.x(span.step + 1)
        end = plot.x(spans[number + 1].step + 1 if number + 1 < len(spans) else last)
        hint = (
            f"generation {span.number}: {span.layout}, {span.workers} workers, from step {span.step + 1}: {span.cause}"
        )
        plot.box(begin, plot.top, end - begin, plot.bottom - plot.top, f"band band{number % 2}", hint)
        if number:
            kind = "faultline" if span.fault else "changeline"
            plot.line(begin, plot.top, begin, plot.bottom, kind, hint)
        label = f"{span.workers}w {span.layout}" if plot.width > NARROW else f"{span.workers}w"
        needed = len(label) * LETTER_PX + 8
        if begin >= free and begin + needed <= plot.right + 8:
            plot.text(begin + 2, plot.top - 5, label, name="label small")
            free = begin + needed


def over_time(
    ident: str,
    title: str,
    text: str,
    width: int,
    edges: Floats,
    values: Floats,
    y_label: str,
    most: float | None = None,
) -> str:
    """A curve of steps: ``values[i]`` from ``edges[i]`` to ``edges[i + 1]``, seconds since the run began; "" for none.

    Args:
        most: a level to mark: what there could be at most.
    """
    if not len(values):
        return ""
    span = float(edges[-1])
    high = max(float(values.max()), most or 0.0) or 1.0
    marks = time_ticks(span, 8 if width > NARROW else 4)
    plot = Plot(
        ident,
        title,
        text,
        width,
        x=(0.0, span),
        y=(0.0, high * (1 + PAD)),
        x_label="time since the run began",
        y_label=y_label,
        x_ticks=(marks, time_label(marks)),
        height=200,
    )
    if most is not None:
        plot.line(plot.left, plot.y(most), plot.right, plot.y(most), "limit", f"at most {most:g}")
    corners = np.stack([np.repeat(edges, 2)[1:-1], np.repeat(values, 2)], axis=1)
    plot.curve(((float(x), float(y)) for x, y in corners), "curve a")
    return plot.markup()


def workers(spans: Sequence[Span], began: float) -> tuple[Floats, Floats]:
    """(edges in seconds since ``began``, workers between them): 0 while there is no generation."""
    edges: list[float] = [0.0]
    counts: list[float] = []
    for span in spans:
        start, end = max(edges[-1], span.began - began), max(edges[-1], span.ended - began)
        if start > edges[-1]:
            edges.append(start)
            counts.append(0.0)
        edges.append(end)
        counts.append(float(span.workers))
    return np.array(edges if counts else []), np.array(counts)
