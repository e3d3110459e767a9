"""A picture of a run: loss over steps, generations as bands, faults as marks. Plain SVG, no library needed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

WIDTH, HEIGHT = 860, 330
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 64, 44
BANDS = ("#e8f1fb", "#fdf1e3", "#eaf6ea", "#f5ebf7")

Row = Mapping[str, Any]


def run_svg(metrics: Iterable[Row], events: Iterable[Row], title: str) -> str:
    """SVG text for the rows of ``metrics.jsonl`` and ``events.jsonl``.

    Steps that were redone appear once, as last executed; a run without any step gives a picture that says so.
    """
    losses = {int(row["step"]): float(row["loss"]) for row in metrics if _known(row["loss"])}
    generations = [row for row in events if row["event"] == "generation"]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 22, title, size=15, weight="bold"),
    ]
    if not losses:
        return "\n".join([*parts, _text(LEFT, 60, "no step was completed"), "</svg>"])
    last = max(losses)
    top = max(losses.values()) * 1.05

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / max(1, last)

    def y(loss: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - loss / top)

    for number, generation in enumerate(generations):
        begin = int(generation["step"])
        end = int(generations[number + 1]["step"]) if number + 1 < len(generations) else last
        planned = generation["cause"] in ("start", "resize")
        parts.append(
            f'<rect x="{x(begin):.1f}" y="{TOP}" width="{max(0.0, x(end) - x(begin)):.1f}" '
            f'height="{HEIGHT - TOP - BOTTOM}" fill="{BANDS[number % len(BANDS)]}"/>'
        )
        label = f"{generation['layout']} ({len(generation['workers'])})"
        parts.append(_text(x(begin) + 4, TOP - 20 + 12 * (number % 2), label, size=10, fill="#444"))
        if number:
            colour = "#2a7" if planned else "#c33"
            parts.append(
                f'<line x1="{x(begin):.1f}" x2="{x(begin):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" '
                f'stroke="{colour}" stroke-width="1.5" stroke-dasharray="4 3"/>'
            )
            parts.append(_text(x(begin) + 4, TOP + 14, str(generation["cause"])[:40], size=10, fill=colour))
    for loss in ticks(top):
        parts.append(_text(LEFT - 6, y(loss) + 4, f"{loss:g}", size=10, anchor="end", fill="#666"))
    for step in ticks(last):
        parts.append(_text(x(step), HEIGHT - BOTTOM + 16, f"{step:g}", size=10, anchor="middle", fill="#666"))
    points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in sorted(losses.items()))
    parts.append(f'<polyline points="{points}" fill="none" stroke="#1f5fa8" stroke-width="1.6"/>')
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "optimizer step", size=11, anchor="middle"))
    parts.append(_text(12, TOP - 6, "loss", size=11))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _known(loss: float | None) -> bool:
    return loss is not None and math.isfinite(loss)


def ticks(top: float, wanted: int = 6) -> list[float]:
    """Round numbers from 0 to at most ``top``, about ``wanted`` of them."""
    if top <= 0:
        return [0.0]
    size = 10.0 ** math.floor(math.log10(top / wanted))
    step = next(size * factor for factor in (1, 2, 5, 10, 20) if top / (size * factor) <= wanted)
    return [round(step * number, 10) for number in range(math.floor(top / step) + 1)]


def _text(x: float, y: float, text: str, size: int = 12, anchor: str = "start", **style: str) -> str:
    extra = {"weight": "font-weight", "fill": "fill"}
    attributes = "".join(f' {extra[key]}="{value}"' for key, value in style.items())
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"{attributes}>{escape(text)}</text>'
