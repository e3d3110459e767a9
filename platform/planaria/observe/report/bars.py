"""Bars: where the wall time went, what recoveries were made of, what ranks did."""

from __future__ import annotations

from collections.abc import Sequence

from planaria.observe.report.episodes import Span
from planaria.observe.report.scales import Scale, ticks
from planaria.observe.report.svg import LETTER_PX, NARROW, Drawing
from planaria.observe.text import duration

ROW = 20
MOST_RECOVERIES = 24
"""Recoveries in the chart; the table has all."""


def share_bar(ident: str, title: str, text: str, width: int, parts: Sequence[tuple[str, str, float]]) -> str:
    """One bar, divided.

    Args:
        parts: (class, name, size), in order.
    """
    whole = sum(size for _, _, size in parts)
    if whole <= 0:
        return ""
    drawing = Drawing(ident, title, text, width, 36)
    x = Scale(0.0, whole, 0.0, float(width))
    at = 0.0
    for name, label, size in parts:
        hint = f"{label}: {duration(size)}, {100 * size / whole:.1f}%"
        drawing.box(x(at), 2, x(at + size) - x(at), 32, f"part {name}", hint)
        at += size
    return drawing.markup()


def recovery_bars(ident: str, title: str, text: str, width: int, spans: Sequence[Span]) -> str:
    """One row per recovery, its phases laid end to end; all rows on one scale."""
    rows = [(span, span.recovery) for span in spans if span.recovery is not None and span.recovery.seconds is not None]
    if not rows:
        return ""
    longest = max(found.seconds or 0.0 for _, found in rows) or 1.0
    left = 48.0
    drawing = Drawing(ident, title, text, width, 34 + ROW * len(rows))
    x = Scale(0.0, longest, left, width - 70.0)
    for number, (span, found) in enumerate(rows):
        top = 4 + ROW * number
        drawing.text(left - 6, top + 13, f"gen {span.number}", "end")
        at = 0.0
        for phase, took in found.phases.items():
            hint = f"generation {span.number}, {span.cause}: {phase.replace('_', ' ')} {duration(took)}"
            drawing.box(x(at), top, x(at + took) - x(at), ROW - 4, f"part {phase}", hint)
            at += took
        drawing.text(x(at) + 5, top + 13, duration(found.seconds))
    bottom = 4 + ROW * len(rows)
    for value in ticks(0.0, longest, 6 if width > NARROW else 3):
        drawing.line(x(value), 0, x(value), bottom, "grid")
        drawing.text(x(value), bottom + 16, f"{value:g} s", "middle")
    return drawing.markup()


def rank_bars(ident: str, title: str, text: str, width: int, rows: Sequence[tuple[str, float, str]]) -> str:
    """One bar per rank.

    Args:
        rows: (name, value, value in words).
    """
    if not rows:
        return ""
    left = 10 + max(len(name) for name, _, _ in rows) * LETTER_PX
    right = 10 + max(len(words) for _, _, words in rows) * LETTER_PX
    drawing = Drawing(ident, title, text, width, 6 + ROW * len(rows))
    x = Scale(0.0, max(value for _, value, _ in rows) or 1.0, left, width - right)
    for number, (name, value, words) in enumerate(rows):
        top = 4 + ROW * number
        drawing.text(left - 6, top + 13, name, "end")
        drawing.box(left, top, x(value) - left, ROW - 4, "part productive", f"{name}: {words}")
        drawing.text(x(value) + 5, top + 13, words)
    return drawing.markup()
