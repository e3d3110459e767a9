"""Drawings as SVG text: escaped, titled, described, coloured by the page's own classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

from planaria.observe.report.scales import Scale, ticks

FONT_PX = 12
LETTER_PX = 6.6
"""Width of a letter, near enough to keep labels apart."""
TALL, WIDE = 220, 960
NARROW = 340
"""The two widths that every chart is drawn in: a scaled one could not be read on a phone."""


class Drawing:
    """Collects shapes, then wraps them into one ``svg`` element that a screen reader calls by its title.

    Args:
        ident: unique in the page.
        title: what it is.
        text: what it shows, for who does not see it.
        width: pixels.
        height: pixels.
    """

    def __init__(self, ident: str, title: str, text: str, width: int, height: int) -> None:
        self.ident, self.width, self.height = ident, width, height
        self._head = (
            f'<svg role="img" aria-labelledby="{ident}-t {ident}-d" viewBox="0 0 {width} {height}" '
            f'xmlns="http://www.w3.org/2000/svg"><title id="{ident}-t">{escape(title)}</title>'
            f'<desc id="{ident}-d">{escape(text)}</desc>'
        )
        self._parts: list[str] = []

    def text(self, x: float, y: float, text: str, anchor: str = "start", name: str = "label") -> None:
        """A line of text at its baseline."""
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{name}">{escape(text)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, name: str, hint: str = "") -> None:
        """A straight line; ``hint`` is shown by a mouse that rests on it."""
        self._shape(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{name}"', hint, "line")

    def box(self, x: float, y: float, width: float, height: float, name: str, hint: str = "") -> None:
        """A filled rectangle."""
        size = f'width="{max(0.0, width):.2f}" height="{max(0.0, height):.1f}"'
        self._shape(f'<rect x="{x:.2f}" y="{y:.1f}" {size} class="{name}"', hint, "rect")

    def dot(self, x: float, y: float, radius: float, name: str, hint: str = "") -> None:
        """A filled circle."""
        self._shape(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" class="{name}"', hint, "circle")

    def path(self, points: Iterable[tuple[float, float]], name: str) -> None:
        """A line through points."""
        steps = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        if steps:
            self._parts.append(f'<polyline points="{steps}" class="{name}"/>')

    def markup(self) -> str:
        """The whole element."""
        return f"{self._head}{''.join(self._parts)}</svg>"

    def _shape(self, opening: str, hint: str, tag: str) -> None:
        self._parts.append(f"{opening}><title>{escape(hint)}</title></{tag}>" if hint else f"{opening}/>")


class Plot(Drawing):
    """A drawing with two axes.

    Args:
        x: (low, high) of the values on the horizontal axis.
        y: (low, high) of those on the vertical one.
        x_label, y_label: what the axes are.
        x_ticks: places of the marks below, and how each is written.
        above: pixels kept free above the field, for labels.
    """

    def __init__(
        self,
        ident: str,
        title: str,
        text: str,
        width: int,
        *,
        x: tuple[float, float],
        y: tuple[float, float],
        x_label: str,
        y_label: str,
        x_ticks: tuple[Sequence[float], Callable[[float], str]] | None = None,
        height: int = TALL,
        above: int = 0,
    ) -> None:
        super().__init__(ident, title, text, width, height)
        marks = ticks(*y, 4)
        left = 14 + max(len(f"{value:g}") for value in marks) * LETTER_PX
        self.left, self.right, self.top, self.bottom = left, width - 14.0, 22.0 + above, height - 38.0
        self.x, self.y = Scale(*x, self.left, self.right), Scale(*y, self.bottom, self.top)
        for value in marks:
            self.line(self.left, self.y(value), self.right, self.y(value), "grid")
            self.text(self.left - 6, self.y(value) + 4, f"{value:g}", "end")
        places, written = (
            x_ticks if x_ticks is not None else (ticks(*x, 8 if width > NARROW else 4), lambda v: f"{v:,.10g}")
        )
        for value in places:
            at, label = self.x(value), written(value)
            half = len(label) * LETTER_PX / 2
            self.text(min(max(at, half), width - half), self.bottom + 16, label, "middle")
            self.line(at, self.bottom, at, self.bottom + 4, "axis")
        self.line(self.left, self.bottom, self.right, self.bottom, "axis")
        self.text((self.left + self.right) / 2, height - 6, x_label, "middle")
        self.text(2, 12, y_label)

    def curve(self, points: Iterable[tuple[float, float]], name: str) -> None:
        """A line through points that are given as values."""
        self.path(((self.x(x), self.y(y)) for x, y in points), name)
