"""Goodput while nodes come and go: Planaria and Ray Train elastic on the same work under the same faults.

``python jobs/bench/goodput.py [--minutes 5] [--rounds 1] [--quick] [--only planaria] [--json FILE]``
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

import _report as report
from _measure import NoRecovery, Step, productive
from _peers.fault import over
from _peers.planaria_job import run_dir
from _peers.work import Work
from _runs import CONTENDERS, carried_out, load, setting_table, settings
from planaria.observe.record import read_lines
from planaria.observe.text import goodput_rows

NAMES = ("planaria", "ray-train")
EVERY_S, AWAY_S = 30.0, 20.0
QUICK_OUTAGES, QUICK_LASTS_S = ((12.0, 27.0),), 42.0
START_S = 75.0
"""Longest time from the start of a run to its first step, and from its end to its processes' end."""
QUICK_S = 170.0
STEPS = 1_000_000
ABOUT = """\
The same model, data, global batch, optimizer and checkpoint interval, and the same faults, at the same seconds from the
first completed step: every process of a node is ended by SIGKILL, and a new node comes a while later; always the node
goes that has lived longest. Both contenders are measured in the same way, from outside, by the times at which steps are
completed: `goodput` is the sum of the durations of the steps that count over the wall time from the first completed
step to the end. A step counts if it was not undone, that is, if no later step has the same or a lower number; its
duration is the time since the step before it in the same incarnation (so waiting for data and for checkpoints is in
it), and for the first step of an incarnation the median of that number of workers. `at calm pace` counts every
step that counts with the median duration before the first fault instead, so that the slowness of a disturbed machine
counts as lost, too: start-ups of processes take the cores from training where all nodes share one machine. Steps since
the last checkpoint that an outage at the very end would undo count all the same. Contenders run one at a time, in
turns. `committed`: steps that count, of all that were `done`. `worst gap`: the longest time without a completed step.
`goodput_vs_ray_train` is the ratio of the medians of `goodput`. Planaria's own account is stricter: it counts neither
waiting for data nor for snapshots as productive, and begins with the start of the job."""


def main(arguments: list[str] | None = None) -> int:
    """Run, print, write; returns the exit code."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    work = planned(options)
    rows = measure_all(options, work, Console(stderr=True))
    result = build_report(rows, work, datetime.date.today().isoformat())
    console = Console()
    console.print(result.about + "\n", style="dim")
    result.print(console)
    if options.json:
        result.write(options.json)
    return 0 if all("absent" not in row for row in rows if row["contender"] == "planaria") else 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Productive share of the wall time while nodes come and go.")
    parser.add_argument("--minutes", type=float, default=5.0, help="length of a run from its first step (default: 5)")
    parser.add_argument("--rounds", type=int, default=1, help="runs of every contender (default: 1)")
    parser.add_argument("--quick", action="store_true", help="one loss, under three minutes in all")
    parser.add_argument("--only", action="append", choices=NAMES, help="run only these; may be repeated")
    parser.add_argument("--json", metavar="FILE", help="write the report here")
    parser.add_argument("--logs", metavar="FOLDER", type=Path, help="keep the output of every run here")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.minutes * 60 <= EVERY_S:
        parser.error(f"--rounds must be at least 1, and --minutes more than {EVERY_S / 60:g}")
    return options


def planned(options: argparse.Namespace) -> Work:
    """The job, and when nodes go and come."""
    if options.quick:
        return Work("", steps=STEPS, outages=QUICK_OUTAGES, lasts_s=QUICK_LASTS_S)
    lasts_s = options.minutes * 60
    times = [EVERY_S * turn for turn in range(1, int(lasts_s / EVERY_S) + 1) if EVERY_S * turn < lasts_s]
    return Work("", steps=STEPS, outages=tuple((at, at + AWAY_S) for at in times), lasts_s=lasts_s)


def measure_all(options: argparse.Namespace, work: Work, console: Console) -> list[dict[str, Any]]:
    """Every contender in every round, in turns."""
    names = options.only or list(NAMES)
    deadline = time.monotonic() + QUICK_S if options.quick else float("inf")
    rows: list[dict[str, Any]] = []
    for turn in range(1 if options.quick else options.rounds):
        for name in names if turn % 2 == 0 else names[::-1]:
            limit = min(START_S + work.lasts_s, deadline - time.monotonic())
            if limit < work.lasts_s + 10:
                row = {"contender": name, "absent": f"no time left of the {QUICK_S:.0f} s of --quick"}
            else:
                console.print(f"round {turn + 1}: {name} ...")
                row = run(name, work, limit, options.logs)
            rows.append({"round": turn + 1} | row)
            console.print(f"  {row.get('absent') or 'goodput ' + report.number(row['goodput'])}")
    return rows


def run(name: str, work: Work, limit_s: float, logs: Path | None) -> dict[str, Any]:
    """One run of one contender: its figures, or ``absent`` with the reason."""
    row: dict[str, Any] = {"contender": name, "load": load()}
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
    with carried_out(CONTENDERS[name][0], work, limit_s, over, logs / f"{name}.txt" if logs else None) as (
        done,
        ending,
    ):
        try:
            return row | figures(name, done)
        except (NoRecovery, ValueError) as error:
            return row | {"absent": f"{error}; {ending or 'exit code 0'}"}


def figures(name: str, work: Work) -> dict[str, Any]:
    """What the logs of a run say.

    Raises:
        NoRecovery: there are too few steps.
        ValueError: the run ended before its time.
    """
    faults = read_lines(work.path / "faults.jsonl")
    end = next((row["time"] for row in faults if row["kind"] == "end"), None)
    if end is None:
        raise ValueError(f"ended early, after {sum(row['kind'] == 'lost' for row in faults)} lost nodes")
    steps = _planaria_steps(work) if name == "planaria" else _peer_steps(work)
    lost = [row["time"] for row in faults if row["kind"] == "lost"]
    found = productive(steps, min(lost, default=end), end)
    extra: dict[str, Any] = {
        "nodes_lost": len(lost),
        "goodput": found.goodput,
        "at_undisturbed_pace": found.at_undisturbed_pace,
        "longest_outage_seconds": _longest_gap(steps, end),
        "worlds": sorted({step.world for step in steps}),
    }
    own = read_lines(run_dir(work) / "goodput.jsonl") if name == "planaria" else []
    if own:
        extra["own_account"] = {key: value for key, value in own[-1].items() if key != "time"}
    return asdict(found) | extra


def _planaria_steps(work: Work) -> list[Step]:
    events = read_lines(run_dir(work) / "events.jsonl")
    worlds = {event["gen"]: len(event["workers"]) for event in events if event["event"] == "generation"}
    rows = read_lines(run_dir(work) / "metrics.jsonl")
    return [Step(row["step"] + 1, row["time"], str(row["gen"]), worlds[row["gen"]]) for row in rows]


def _peer_steps(work: Work) -> list[Step]:
    rows = read_lines(work.path / "steps.jsonl")
    return [Step(row["step"], row["time"], row["inc"], row["world"]) for row in rows]


def _longest_gap(steps: list[Step], end: float) -> float:
    times = sorted([*(step.time for step in steps if step.time <= end), end])
    return max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)


def build_report(rows: list[dict[str, Any]], work: Work, date: str) -> report.Report:
    """Medians, ratios and tables of the measured rows."""
    names = list(dict.fromkeys(row["contender"] for row in rows))
    ours, peer = (_spread(rows, name, "goodput") for name in NAMES)
    values = {
        "goodput": ours.median if ours else None,
        "goodput_vs_ray_train": report.ratio(ours, peer),
    }
    return report.Report(
        name="goodput",
        title="Goodput while nodes come and go",
        about=ABOUT.replace("\n", " "),
        machine=report.machine(date),
        versions=report.versions(),
        settings={"work": _work(work), "contenders": {name: settings(name) for name in names}},
        rows=rows,
        figures={name: value for name, value in values.items() if value is not None},
        tables=[
            table
            for table in (
                _comparison(rows, names, work),
                _absent(rows),
                _own_account(rows),
                setting_table(_work(work), names),
            )
            if table.rows
        ],
    )


def _spread(rows: list[dict[str, Any]], name: str, key: str) -> report.Spread | None:
    return report.spread(row.get(key) for row in rows if row["contender"] == name)


COLUMNS = {
    "goodput": "goodput",
    "at calm pace": "at_undisturbed_pace",
    "committed": "committed",
    "done": "steps",
    "calm step, s": "undisturbed_step_seconds",
    "worst gap, s": "longest_outage_seconds",
}


def _comparison(rows: list[dict[str, Any]], names: list[str], work: Work) -> report.Table:
    lines = [
        [name, *(str(_spread(rows, name, key) or report.NOTHING) for key in COLUMNS.values())]
        for name in names
        if _spread(rows, name, "goodput") is not None
    ]
    title = f"{len(work.outages)} node(s) lost in {work.lasts_s:.0f} s"
    return report.Table(title, ("contender", *COLUMNS), lines)


def _absent(rows: list[dict[str, Any]]) -> report.Table:
    lines = [[row["contender"], str(row["round"]), row["absent"]] for row in rows if "absent" in row]
    return report.Table("Absent", ("contender", "round", "reason"), lines)


def _own_account(rows: list[dict[str, Any]]) -> report.Table:
    """What Planaria itself says of the latest run, from the start of the job to the last row that it wrote."""
    accounts = [row["own_account"] for row in rows if "own_account" in row]
    lines = []
    if accounts:
        wall = accounts[-1]["wall"]
        for name, seconds, phases in goodput_rows(accounts[-1]):
            detail = ", ".join(f"{phase} {report.number(took)}" for phase, took in phases.items())
            lines.append([name, report.number(seconds), f"{100 * seconds / wall:.1f}%", detail or report.NOTHING])
    return report.Table("Planaria's own account, start-up included", ("class", "s", "share", "of which"), lines)


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
        "checkpoint_every": work.checkpoint_every,
        "seconds": work.lasts_s,
        "node lost and returned at": "; ".join(f"{lost:g} s, {returned:g} s" for lost, returned in work.outages),
    }


if __name__ == "__main__":
    sys.exit(main())
