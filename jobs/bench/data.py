"""Loading of image-text pairs: Planaria's loader beside others, and beside decoding alone, on the same shards.

``python jobs/bench/data.py [--sides 224 512 1024] [--rounds 3] [--seconds 8] [--shards GLOB] [--quick] [--json FILE]``
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

import _report as report
from _data import balance
from _data.contenders import CONTENDERS
from _data.shards import write_shards
from _runs import scratch

LIMIT, OURS, PEER = "decode limit", "planaria", "webdataset + DataLoader"
LIMIT_S = 180.0
COUNTS = {224: 2000, 512: 800, 1024: 400}
ABOUT = """\
Pairs from WebDataset tars on the local disk to batches of 32: JPEG decoded, fitted to 224 pixels (bicubic), scaled to
float32, caption to byte tokens, padded. Every contender has one process that loads, beside the one that takes the
batches, its ordinary way to shuffle, and two batches ahead; what a batch holds is made by the same functions. Planaria
hands pictures over as bytes and scales them where they are used, which is in the figure. `decode limit`: the same
JPEGs decoded one after the other from memory, and nothing else; larger pictures leave more to the resize, which the
limit has not. `per CPU s`: pairs over the CPU seconds of all processes. Contenders take turns, round by round."""


def main(arguments: list[str] | None = None) -> int:
    """Run, print, write; returns the exit code: 1 if a contender is absent."""
    options = parse(arguments)
    console = Console(stderr=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="planaria-data-") as folder:
        sets = {f"{side} px": str(Path(folder, str(side), "*.tar")) for side in options.sides}
        for side in options.sides:
            console.print(f"writing pictures of {side} pixels")
            write_shards(Path(folder, str(side)), COUNTS.get(side, 400), side)
        if options.shards:
            sets["given"] = options.shards
        for number in range(options.rounds):
            for name, pattern in sets.items():
                for contender in CONTENDERS:
                    row = {"set": name, "contender": contender, "round": number}
                    row |= measure(contender, pattern, options)
                    rows.append(row)
                    console.print(f"{name}, {contender}: {row.get('pairs_per_s', row.get('absent'))}")
    result = build_report(rows, list(sets), options, datetime.date.today().isoformat())
    result.print()
    if options.json:
        result.write(options.json)
    return 0 if all("absent" not in row for row in rows) else 1


def measure(contender: str, pattern: str, options: argparse.Namespace) -> dict[str, Any]:
    """One contender in a process of its own: its rates, or why there are none."""
    with scratch() as (folder, environment):
        command = [sys.executable, "-m", "_data", contender, pattern, str(options.batch), str(options.seconds)]
        try:
            done = subprocess.run(
                command, env=environment, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return {"absent": f"not done within {LIMIT_S:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {"absent": reason[:200]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Pairs per second of several loaders.")
    parser.add_argument("--sides", type=int, nargs="*", default=[224, 512, 1024], help="of the pictures, in pixels")
    parser.add_argument("--shards", help="glob of further WebDataset shards, of your own")
    parser.add_argument("--batch", type=int, default=32, help="pairs of a batch (default: 32)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each (default: 3)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement, after a warm-up (default: 8)")
    parser.add_argument("--quick", action="store_true", help="one size, one round, two seconds")
    parser.add_argument("--json", metavar="FILE", help="write the report here")
    options = parser.parse_args(arguments)
    if min([options.batch, options.rounds, options.seconds, *options.sides]) <= 0:
        parser.error("--sides, --batch, --rounds and --seconds must be positive")
    if not options.sides and not options.shards:
        parser.error("nothing to read: give --sides or --shards")
    if options.quick:
        options.sides, options.rounds, options.seconds = options.sides[:1], 1, 2.0
    return options


def build_report(rows: list[dict[str, Any]], sets: list[str], options: argparse.Namespace, date: str) -> report.Report:
    """Medians over the rounds, and their ratios."""
    figures: dict[str, float] = balance.figures()
    for name in sets:
        key = name.replace(" ", "_")
        for figure, contender in (("pairs_vs_webdataset", PEER), ("pairs_vs_decode_limit", LIMIT)):
            for suffix, rate in (("", "pairs_per_s"), ("_per_cpu", "pairs_per_cpu_s")):
                if value := report.ratio(_of(rows, name, OURS, rate), _of(rows, name, contender, rate)):
                    figures[f"{figure}{suffix}_{key}"] = value
    settings = {
        "pairs of a batch": options.batch,
        "seconds of a measurement": options.seconds,
        "rounds": options.rounds,
    }
    return report.Report(
        name="data",
        title="Loading of image-text pairs",
        about=ABOUT.replace("\n", " "),
        machine=report.machine(date),
        versions=report.versions() | _versions(),
        settings=settings,
        rows=rows,
        figures=figures,
        tables=[_table(rows, name) for name in sets],
    )


def _of(rows: list[dict[str, Any]], name: str, contender: str, key: str) -> report.Spread | None:
    return report.spread(row.get(key) for row in rows if (row["set"], row["contender"]) == (name, contender))


def _table(rows: list[dict[str, Any]], name: str) -> report.Table:
    lines = []
    keys = ("pairs_per_s", "pairs_per_cpu_s", "first_batch_s", "mib")
    for contender in CONTENDERS:
        cells = [str(_of(rows, name, contender, key) or report.NOTHING) for key in keys]
        reasons = {row["absent"] for row in rows if row["contender"] == contender and "absent" in row}
        lines.append([contender, *cells, "; ".join(sorted(reasons)) or report.NOTHING])
    columns = ("contender", "pairs per s", "per CPU s", "s to first batch", "MiB", "absent")
    return report.Table(f"Pictures: {name}", columns, lines)


def _versions() -> dict[str, str]:
    from importlib import metadata

    found = {}
    for package in ("pillow", "webdataset", "datasets"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
