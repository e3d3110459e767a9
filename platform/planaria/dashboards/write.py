"""Dashboards as text: the JSON that Grafana reads, and a drawing of the grid for whoever lays one out. Pure."""

from __future__ import annotations

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as model

from planaria.dashboards.board import COLUMNS, Board, Row, build


def as_json(board: Board) -> str:
    """``board`` as Grafana's JSON, always with the same order of keys."""
    return encode(build(board))


def encode(made: model.Dashboard) -> str:
    """Grafana's model as JSON."""
    return JSONEncoder(sort_keys=True, indent=2).encode(made) + "\n"


def grid(board: Board, cell: int = 5) -> str:
    """The places of all panels, ``cell`` characters per column of the grid and one line per line of panels."""
    lines = [f"{board.title}"]
    line: dict[int, list[str]] = {}
    for what, place in board.places():
        if isinstance(what, Row):
            line.setdefault(place.y, []).append(f"-- {what.title} ".ljust(COLUMNS * cell, "-"))
        else:
            inner = place.w * cell - 2
            text = f"{what.title} ({what.kind})"[:inner].center(inner)
            line.setdefault(place.y, []).append(f"[{text}]")
    for y in sorted(line):
        lines.append(f"{y:4} " + "".join(line[y]))
    return "\n".join(lines)
