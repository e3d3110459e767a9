"""What a report is made of: sections of figures and tables, as plain values for the template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from planaria.observe.report.svg import NARROW, WIDE


@dataclass(frozen=True)
class Table:
    """Rows of text under headings."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: frozenset[int] = frozenset()
    """Columns of numbers."""
    folded: bool = False
    """Whether it waits behind its caption until somebody opens it."""


@dataclass(frozen=True)
class Figure:
    """A chart in two widths, with what it shows in words and, folded away, in numbers."""

    title: str
    text: str
    wide: str
    narrow: str
    legend: Sequence[tuple[str, str]] = ()
    """(class, name) pairs."""
    table: Table | None = None


@dataclass(frozen=True)
class Section:
    """One heading of the report and what stands below it."""

    ident: str
    title: str
    says: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    facts: Mapping[str, str] = field(default_factory=dict)


def figure(
    ident: str,
    title: str,
    text: str,
    draw: Callable[[str, str, str, int], str],
    legend: Sequence[tuple[str, str]] = (),
    table: Table | None = None,
) -> list[Figure]:
    """The figure that ``draw(ident, title, text, width)`` draws; none if it draws nothing."""
    wide = draw(f"{ident}-w", title, text, WIDE)
    return [Figure(title, text, wide, draw(f"{ident}-n", title, text, NARROW), legend, table)] if wide else []


def count(number: int, one: str, many: str = "") -> str:
    """``1 step``, ``3 steps``."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
