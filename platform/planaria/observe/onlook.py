"""What ``planaria top`` draws: the panel of the live view, with processes and news below it. Pure."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planaria.observe import text as as_text
from planaria.observe.view import NARROW, as_cell, overflow, status_panel

LIVES = ("ready", "starting", "lost")
STYLES = {"ready": "green", "starting": "cyan", "lost": "dim"}
FEW = 4
"""Rows of workers and of news that are shown however low the terminal is."""
PANEL = 14
"""Lines of the panel without its table of generations."""


def frame(seen: Mapping[str, Any], *, now: float, width: int, height: int | None, plain: bool) -> RenderableType:
    """One frame.

    Args:
        seen: as :func:`planaria.control.summary.look` makes it.
        now: ``time.time()``.
        width: columns of the terminal.
        height: its lines; None: as many as are needed.
        plain: draw with ASCII characters.
    """
    status = seen["status"]
    panel = status_panel(
        seen["name"], status, seen["losses"], elapsed_s=max(0.0, now - seen["began"]), width=width, plain=plain
    )
    rows = min(len(status["generations"]), 6)
    left = None if height is None else max(2 * FEW, height - PANEL - (rows + 3 if rows else 0) - 6)
    workers = ranked(seen["processes"])
    shown = workers if left is None else workers[: max(FEW, left - min(len(seen["events"]), left // 2))]
    news = list(seen["events"])[-(10 if left is None else max(FEW, left - len(shown))) :]
    parts: list[RenderableType] = [panel, _line("processes", staff_text(seen["processes"]), plain)]
    parts += [_line("memory", text, plain) for text in [memory_text(status.get("memory") or {})] if text]
    held = as_text.quarantine_text(status.get("nodes") or ())
    parts += [_line("quarantined", held, plain)] if held else []
    if shown:
        parts.append(worker_table(shown, width=width, plain=plain))
        if len(workers) > len(shown):
            parts.append(Text(f"({len(workers) - len(shown)} more not shown)", style="dim"))
    for at, _kind, text in news:
        stamp = time.strftime("%H:%M:%S", time.localtime(at))
        parts.append(_line(stamp, text, plain))
    return Group(*parts)


def ranked(processes: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The workers: those that train, by rank, then those that wait, then those that start; not the lost ones."""
    workers = [row for row in processes if row["kind"] == "worker" and row["life"] != "lost"]
    return sorted(workers, key=lambda row: (row["rank"] is None, row["rank"] or 0, row["life"] != "ready"))


def staff_text(processes: Sequence[Mapping[str, Any]]) -> str:
    """``workers 3 ready, 1 starting; loaders 2 ready, 1 lost``."""
    texts = []
    for kind in dict.fromkeys(str(row["kind"]) for row in processes):
        lives = Counter(row["life"] for row in processes if row["kind"] == kind)
        texts.append(f"{kind}s " + ", ".join(f"{lives[life]} {life}" for life in LIVES if lives[life]))
    return "; ".join(texts) or "none"


def memory_text(memory: Mapping[str, int]) -> str | None:
    """Shared memory that snapshots take, over all nodes and on the fullest; None if there is none."""
    if not memory or not max(memory.values()):
        return None
    most = max(memory.values())
    return f"{sum(memory.values()) / 2**20:,.0f} MiB on {len(memory)} nodes, at most {most / 2**20:,.0f} MiB on one"


def worker_table(rows: Sequence[Mapping[str, Any]], *, width: int, plain: bool) -> Table:
    """One row per worker; a narrow one leaves out for how long it has been so."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    names = ["rank", "worker", "node", "state", *(["for"] if width >= NARROW else [])]
    for name in names:
        right = name in ("rank", "for")
        table.add_column(name, justify="right" if right else "left", no_wrap=True, overflow=overflow(plain))
    for row in rows:
        rank = "-" if row["rank"] is None else str(row["rank"])
        state = "training" if row["rank"] is not None and row["life"] == "ready" else row["life"]
        state = "spare" if row["rank"] is None and row["life"] == "ready" else state
        cells = [as_cell(str(text), plain) for text in (rank, row["ident"], str(row["node"])[:8])]
        cells.append(Text(state, style=STYLES.get(row["life"], "")))
        table.add_row(*cells, *([as_text.duration(row["since_s"])] if width >= NARROW else []))
    return table


def _line(label: str, text: str, plain: bool) -> Text:
    line = Text(f"{label}  ", style="dim", no_wrap=True, overflow=overflow(plain))
    return line.append_text(Text(as_cell(text, plain).plain, style="default not dim"))
