"""Recovery from the loss of a node: Planaria, Ray Train elastic and torchrun elastic on the same work and fault.

``python jobs/bench/recovery.py [--rounds 3] [--quick] [--only planaria] [--defaults] [--json FILE]``
"""

from __future__ import annotations

import argparse
import datetime
import signal
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

import _report as report
from _peers.work import Work
from _runs import CONTENDERS, run, setting_table, settings

LIMIT_S = 240.0
QUICK_S = 170.0
ABOUT = """\
The same model, data, global batch, optimizer and checkpoint interval, and the same fault: SIGKILL, in mid-training, of
every process of the node that carries the last rank. `recovery`: seconds from the kill to the end of the first
optimizer step of the re-formed job (a step that the old one still had in flight does not count). `caught up`: seconds
to the first step that had never been done. `steps lost`: completed steps that had to be done again. Contenders run one
at a time, in turns; the load that other programs put on the machine shows in `seconds per step`. The ratios compare
medians; above 1 Planaria is faster. Peers run with their best settings, as listed;
with `--defaults` also as they come."""


def main(arguments: list[str] | None = None) -> int:
    """Run, print, write; returns the exit code."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    work = Work("", nodes=options.nodes, steps=30, kill_after=15) if options.quick else Work("", nodes=options.nodes)
    console = Console(stderr=True)
    rows = measure_all(options, work, console)
    result = build_report(rows, work, datetime.date.today().isoformat())
    result.print()
    if options.json:
        result.write(options.json)
    return 0 if all("absent" not in row for row in rows if row["contender"] == "planaria") else 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Seconds from the loss of a node to the next optimizer step.")
    parser.add_argument("--rounds", type=int, default=3, help="runs of every contender (default: 3)")
    parser.add_argument("--quick", action="store_true", help="one round, under three minutes; what misses is absent")
    parser.add_argument("--only", action="append", choices=list(CONTENDERS), help="run only these; may be repeated")
    parser.add_argument("--defaults", action="store_true", help="run the peers with their default settings, too")
    parser.add_argument("--nodes", type=int, default=3, choices=(3, 4), help="nodes before the fault (default: 3)")
    parser.add_argument("--json", metavar="FILE", help="write the report here")
    parser.add_argument("--logs", metavar="FOLDER", type=Path, help="keep the output of every run here")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def measure_all(options: argparse.Namespace, work: Work, console: Console) -> list[dict[str, Any]]:
    """Every contender in every round, in turns."""
    names = options.only or [name for name in CONTENDERS if options.defaults or not name.endswith("-defaults")]
    rounds = 1 if options.quick else options.rounds
    deadline = time.monotonic() + QUICK_S if options.quick else float("inf")
    rows: list[dict[str, Any]] = []
    for turn in range(rounds):
        log = options.logs / f"round-{turn + 1}" if options.logs else None
        if log is not None:
            log.mkdir(parents=True, exist_ok=True)
        shift = turn % len(names)  # nobody is always first, on a machine that warms up or fills
        for name in names[shift:] + names[:shift]:
            limit = min(LIMIT_S, deadline - time.monotonic())
            if limit < 20:
                row = {"contender": name, "absent": f"no time left of the {QUICK_S:.0f} s of --quick"}
            else:
                console.print(f"round {turn + 1} of {rounds}: {name} ...")
                row = run(name, work, limit, brief=options.quick, log=log)
            rows.append({"round": turn + 1} | row)
            console.print(f"  {row.get('absent') or report.number(row['recovery_seconds']) + ' s to the next step'}")
    return rows


def build_report(rows: list[dict[str, Any]], work: Work, date: str) -> report.Report:
    """Medians, ratios and tables of the measured rows."""
    names = list(dict.fromkeys(row["contender"] for row in rows))
    recovery = {name: report.spread(_values(rows, name, "recovery_seconds")) for name in CONTENDERS}
    figures = {
        "recovery_seconds": recovery["planaria"].median if recovery["planaria"] else None,
        "recovery_vs_ray_train": report.ratio(recovery["ray-train"], recovery["planaria"]),
        "recovery_vs_torchrun": report.ratio(recovery["torchrun"], recovery["planaria"]),
        "recovery_vs_ray_train_defaults": report.ratio(recovery["ray-train-defaults"], recovery["planaria"]),
        "recovery_vs_torchrun_defaults": report.ratio(recovery["torchrun-defaults"], recovery["planaria"]),
    }
    lost = report.spread(_values(rows, "planaria", "steps_lost"))
    figures["steps_lost"] = lost.median if lost else None
    return report.Report(
        name="recovery",
        title="Recovery from the loss of a node",
        about=ABOUT.replace("\n", " "),
        machine=report.machine(date),
        versions=report.versions(),
        settings={"work": _work(work), "contenders": {name: settings(name) for name in names}},
        rows=rows,
        figures={name: value for name, value in figures.items() if value is not None},
        tables=[
            table
            for table in (_comparison(rows, names), _absent(rows), _phases(rows), setting_table(_work(work), names))
            if table.rows
        ],
    )


def _values(rows: list[dict[str, Any]], name: str, key: str) -> list[float | None]:
    return [row.get(key) for row in rows if row["contender"] == name]


def _comparison(rows: list[dict[str, Any]], names: list[str]) -> report.Table:
    ours = report.spread(_values(rows, "planaria", "recovery_seconds"))
    lines = []
    for name in names:
        cells = [
            str(report.spread(_values(rows, name, key)) or report.NOTHING)
            for key in ("recovery_seconds", "caught_up_seconds", "steps_lost", "step_seconds")
        ]
        times = report.ratio(report.spread(_values(rows, name, "recovery_seconds")), ours)
        mine = [row for row in rows if row["contender"] == name]
        runs = f"{sum('absent' not in row for row in mine)} of {len(mine)}"
        lines.append([name, *cells, f"{report.number(times)}x" if times else report.NOTHING, runs])
    columns = ("contender", "recovery, s", "caught up, s", "steps lost", "s per step", "against Planaria", "runs")
    return report.Table("From SIGKILL of a node to the next optimizer step", columns, lines)


def _absent(rows: list[dict[str, Any]]) -> report.Table:
    lines = [[row["contender"], str(row["round"]), row["absent"]] for row in rows if "absent" in row]
    return report.Table("Absent", ("contender", "round", "reason"), lines)


def _phases(rows: list[dict[str, Any]]) -> report.Table:
    phases = [row["phases"] for row in rows if "phases" in row]
    names = list(dict.fromkeys(name for row in phases for name in row))
    lines = [[name, str(report.spread(row.get(name) for row in phases))] for name in names]
    return report.Table("Where Planaria's time goes", ("phase", "seconds"), lines)


def _work(work: Work) -> dict[str, Any]:
    return {
        "nodes": work.nodes,
        "workers_per_node": 1,
        "model": work.preset,
        "data": "scenes",
        "global_batch": work.global_batch,
        "micro_batch": work.micro_batch,
        "optimizer": "AdamW",
        "precision": "fp32",
        "sharding": "FSDP2 on gloo",
        "steps": work.steps,
        "checkpoint_every": work.checkpoint_every,
        "node_killed_after_step": work.kill_after,
        "victim": "node of the last rank",
    }


if __name__ == "__main__":
    sys.exit(main())
