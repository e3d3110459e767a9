"""A million steps in the width of a page, without hiding any: every column keeps its extremes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def last_of_each(steps: Ints) -> Ints:
    """Positions at which each step was executed for the last time, in order of the steps: the ones that count."""
    if not len(steps):
        return np.zeros(0, np.int64)
    backwards = steps[::-1]
    _, first = np.unique(backwards, return_index=True)
    return (len(steps) - 1 - first).astype(np.int64)


def envelope(x: Floats, y: Floats, columns: int) -> Ints:
    """Positions of the points that a line drawn in ``columns`` columns needs: of every column the first, the last, the
    smallest and the largest (M4: Jugel et al., VLDB 2014). All of them, if there are no more than that.

    Args:
        x: ascending.
        y: finite.
        columns: of the drawing, at least 1.
    """
    if len(x) <= 4 * columns or not x[-1] > x[0]:
        return np.arange(len(x))
    column = np.minimum((x - x[0]) / (x[-1] - x[0]) * columns, columns - 1).astype(np.int64)
    starts = np.flatnonzero(np.diff(column, prepend=-1))
    ends = np.append(starts[1:], len(x)) - 1
    order = np.lexsort((y, column))
    return np.unique(np.concatenate([starts, ends, order[starts], order[ends]]))


def finite_runs(y: Floats) -> list[tuple[int, int]]:
    """Stretches (begin, end) of finite values: a line must not bridge what is not a number."""
    edges = np.diff(np.isfinite(y).astype(np.int8), prepend=0, append=0)
    return [(int(a), int(b)) for a, b in zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1), strict=True)]


def rates(ends: Floats, took: Floats, end: float, most: int, each: int = 5) -> tuple[Floats, Floats]:
    """Steps per second over 0..``end`` in spans of one length; a step that two spans share is divided between them.

    Args:
        ends: when each step was done, ascending, in seconds.
        took: how long each took; NaN: since the one before.
        end: end of the last span.
        most: how many spans at most.
        each: steps that a span should hold on average, lest the rate be all noise.

    Returns:
        (edges of the spans, one more than there are rates; rates).
    """
    if not end > 0 or not len(ends):
        return np.zeros(0), np.zeros(0)
    ends = np.clip(ends, 0.0, end)
    before = np.concatenate([[0.0], ends[:-1]])
    begins = np.clip(np.where(np.isfinite(took), ends - took, before), before, ends)
    spans = max(1, min(most, len(ends) // max(1, each)))
    edges = np.linspace(0.0, end, spans + 1)
    knots = np.stack([begins, ends], axis=1).ravel()
    done = np.repeat(np.arange(len(ends) + 1.0), 2)[1:-1]  # 0 1, 1 2, ...: at the begin and the end of each step
    counted = np.interp(edges, knots, done)
    counted[0], counted[-1] = 0.0, len(ends)
    return edges, np.diff(counted) / (end / spans)
