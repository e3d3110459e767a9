"""Contrastive losses: memory and time per rank as the world grows, the pairs of each rank staying as many.

``python jobs/bench/contrastive.py [--worlds 1 2 4 8] [--pairs 512] [--quick] [--json FILE]``
"""

from __future__ import annotations

import argparse
import datetime
import sys
from typing import Any

from rich.console import Console

import _report as report
from _contrastive.contenders import LOSSES
from _contrastive.ranks import Work, measure

CONTENDERS = ("planaria", "open_clip")
ABOUT = """\
One forward and backward pass of the loss alone, from features to their gradients, by processes on gloo; every rank has
as many pairs in every world, so the global batch grows. Memory: what becomes resident beside the features, at the most,
on the rank that needs most; open_clip's losses with local_loss and gather_with_grad (softmax), and its exchange
between neighbours (sigmoid). Planaria compares own rows with a block of all ranks' features at a time. All processes
share the cores, so seconds compare contenders, not worlds. `difference`: largest gap between both gradients, relative
to the largest gradient, in float32."""


def main(arguments: list[str] | None = None) -> int:
    """Run, print, write; returns the exit code: 1 if gradients differ."""
    options = parse(arguments)
    console = Console(stderr=True)
    work = Work(options.pairs, options.dim, options.columns, options.rounds)
    rows: list[dict[str, Any]] = []
    for world in options.worlds:
        console.print(f"{world} ranks, {world * work.pairs} pairs")
        rows += measure(world, work)
    result = build_report(rows, options, datetime.date.today().isoformat())
    result.print()
    if options.json:
        result.write(options.json)
    return 0 if max(row.get("difference", 0.0) for row in rows) < 1e-3 else 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Memory and time per rank of contrastive losses.")
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of ranks, growing")
    parser.add_argument("--pairs", type=int, default=512, help="pairs per rank (default: 512)")
    parser.add_argument("--dim", type=int, default=512, help="dimensions of a feature (default: 512)")
    parser.add_argument("--columns", type=int, default=512, help="columns of a block (default: 512)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each (default: 3)")
    parser.add_argument("--quick", action="store_true", help="two rounds, at most four ranks; under a minute")
    parser.add_argument("--json", metavar="FILE", help="write the report here")
    options = parser.parse_args(arguments)
    if min(*options.worlds, options.pairs, options.dim, options.columns, options.rounds) < 1:
        parser.error("--worlds, --pairs, --dim, --columns and --rounds must be at least 1")
    if options.quick:
        options.rounds = min(options.rounds, 2)
        options.worlds = [world for world in options.worlds if world <= 4] or [4]
    options.worlds = sorted(set(options.worlds))
    return options


def build_report(rows: list[dict[str, Any]], options: argparse.Namespace, date: str) -> report.Report:
    """Medians over the rounds; figures compare the largest world with the smallest of several ranks."""
    least, most = next((w for w in options.worlds if w > 1), options.worlds[0]), options.worlds[-1]
    figures: dict[str, float] = {}
    for loss in LOSSES:
        for name in CONTENDERS:
            if growth := report.ratio(_of(rows, most, loss, name, "mib"), _of(rows, least, loss, name, "mib")):
                figures[f"{loss}_memory_growth_{name}"] = growth
        pair = [_of(rows, most, loss, name, "mib") for name in reversed(CONTENDERS)]
        if saving := report.ratio(*pair):
            figures[f"{loss}_memory_vs_open_clip"] = 1 / saving
        pair = [_of(rows, most, loss, name, "seconds") for name in reversed(CONTENDERS)]
        if faster := report.ratio(*pair):
            figures[f"{loss}_seconds_vs_open_clip"] = 1 / faster
    settings = {
        "pairs per rank": options.pairs,
        "dimensions": options.dim,
        "columns of a block (planaria)": options.columns,
        "rounds": options.rounds,
        "dtype": "float32",
    }
    return report.Report(
        name="contrastive",
        title="Contrastive losses",
        about=ABOUT.replace("\n", " "),
        machine=report.machine(date),
        versions=report.versions(),
        settings=settings,
        rows=rows,
        figures=figures,
        tables=[*(_table(rows, loss, options) for loss in LOSSES), _settings(settings), *_absent(rows)],
    )


def _of(rows: list[dict[str, Any]], world: int, loss: str, name: str, key: str) -> report.Spread | None:
    wanted = (world, loss, name)
    return report.spread(row.get(key) for row in rows if (row["world"], row["loss"], row["contender"]) == wanted)


def _table(rows: list[dict[str, Any]], loss: str, options: argparse.Namespace) -> report.Table:
    lines = []
    for world in options.worlds:
        for name in CONTENDERS:
            cells = [str(_of(rows, world, loss, name, key) or report.NOTHING) for key in ("mib", "seconds")]
            error = _of(rows, world, loss, name, "difference")
            shown = report.NOTHING if error is None or name == "planaria" else f"{error.median:.0e}"
            lines.append([f"{name}, {world} ranks", str(world * options.pairs), *cells, shown])
    columns = ("contender, world", "pairs", "MiB per rank", "seconds", "difference")
    return report.Table(f"Loss: {loss}", columns, lines)


def _settings(settings: dict[str, Any]) -> report.Table:
    return report.Table("Settings", ("setting", "value"), [[key, str(value)] for key, value in settings.items()])


def _absent(rows: list[dict[str, Any]]) -> list[report.Table]:
    reasons = {row["contender"]: row["absent"] for row in rows if "absent" in row}
    if not reasons:
        return []
    return [report.Table("Absent", ("contender", "why"), [[name, why] for name, why in reasons.items()])]


if __name__ == "__main__":
    sys.exit(main())
