"""Overhead of the controller with everything on, beside a bare ``torchrun`` script of the same work.

``python jobs/bench/overhead.py [--pairs 5] [--ranks 2] [--quick] [--json FILE]``
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import _report as report
from _measure import Step
from _peers import bare
from _peers.planaria_job import run_dir
from _peers.work import Work
from _runs import carried_out, load
from _scraped import SCRAPED_S, run_scraped, table_of_scrapes
from planaria.observe.record import read_lines

NAMES = ("planaria", "torchrun")
MODULES = {"planaria": "planaria_job", "torchrun": "bare"}
LIMIT_S = 240.0
QUICK_S = 170.0
WARM_UP = 100
"""First steps that are not measured: nodes and spare processes are still starting on the same cores."""
LEAST = 20
"""Steps that must be left to measure."""
ABOUT = """\
The same model class, FSDP2 units, layout, global batches, optimizer and number of threads, under Planaria's controller
with everything on (loaders, a snapshot after every step, its copy on another node, checkpoints, the ledger) and in a
bare `torchrun` script with none of it. Runs come in pairs, one after the other, and which is first alternates, as the
load that other programs put on the machine changes. `s per step`: wall time over steps, stalls for checkpoints
included, after a warm-up of a hundred steps in which nodes and spare processes are still starting.
`overhead_vs_torchrun` is the median, over the pairs, of Planaria's time over the bare one's. Keepers, loaders,
controller and the processes of two Ray nodes have no cores of their own where there are no more cores than ranks: what
they compute is in the figure then. With `--ranks 1` on two cores they have one, as they have beside accelerators.
`metrics_overhead` is from one more run of Planaria: windows of five seconds in which its metrics are scraped once a
second, each beside the windows before and after it, in which they are not; the median of the ratios of step times."""


def main(arguments: list[str] | None = None) -> int:
    """Run, print, write; returns the exit code."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    work = planned(options)
    deadline = time.monotonic() + QUICK_S if options.quick else float("inf")
    console = Console(stderr=True)
    scraped = run_scraped(work, QUICK_S / 3 if options.quick else SCRAPED_S, WARM_UP, options.logs)
    words = scraped.get("absent") or f"{report.number(scraped['ratio'])} times as long when scraped"
    console.print(f"metrics: {words}")
    rows = measure_all(options, work, console, deadline)
    result = build_report([*rows, scraped], work, datetime.date.today().isoformat())
    result.print()
    if options.json:
        result.write(options.json)
    return 0 if all("absent" not in row for row in [*rows, scraped]) else 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Step time under the controller beside a bare torchrun script.")
    parser.add_argument("--pairs", type=int, default=5, help="paired runs (default: 5)")
    parser.add_argument("--steps", type=int, default=180, help="steps of a run, warm-up included (default: 180)")
    parser.add_argument("--ranks", type=int, default=2, choices=(1, 2), help="training processes (default: 2)")
    parser.add_argument("--quick", action="store_true", help="shorter runs, under three minutes in all")
    parser.add_argument("--json", metavar="FILE", help="write the report here")
    parser.add_argument("--logs", metavar="FOLDER", type=Path, help="keep the output of every run here")
    options = parser.parse_args(arguments)
    if options.pairs < 1 or options.steps < WARM_UP + LEAST:
        parser.error(f"--pairs must be at least 1, and --steps {WARM_UP + LEAST}")
    return options


def planned(options: argparse.Namespace) -> Work:
    """The demo's model and batch on two nodes, so that copies have a node to go to, also with one rank."""
    steps = min(options.steps, WARM_UP + 2 * LEAST) if options.quick else options.steps
    return Work(
        "",
        nodes=2,
        workers=options.ranks,
        global_batch=64,
        micro_batch=32,
        steps=steps,
        checkpoint_every=25,
        kill_after=0,
    )


def measure_all(
    options: argparse.Namespace, work: Work, console: Console, deadline: float = float("inf")
) -> list[dict[str, Any]]:
    """Both contenders in every pair; as many pairs as the time allows."""
    rows: list[dict[str, Any]] = []
    longest = 0.0
    for pair in range(1, options.pairs + 1):
        began = time.monotonic()
        if pair > 1 and began + longest > deadline:
            break
        for name in NAMES if pair % 2 else NAMES[::-1]:
            row = {"pair": pair} | run(name, work, min(LIMIT_S, deadline - time.monotonic()), options.logs)
            console.print(
                f"pair {pair}: {name}: {row.get('absent') or report.number(row['step_seconds']) + ' s per step'}"
            )
            rows.append(row)
        longest = max(longest, time.monotonic() - began)
    return rows


def run(name: str, work: Work, limit_s: float, logs: Path | None) -> dict[str, Any]:
    """One run of one contender: its figures, or ``absent`` with the reason."""
    row: dict[str, Any] = {"contender": name, "load": load()}
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{name}.txt" if logs is not None else None
    with carried_out(MODULES[name], work, limit_s, None, log) as (done, ending):
        try:
            return row | (planaria_figures(done) if name == "planaria" else peer_figures(done))
        except ValueError as error:
            return row | {"absent": f"{error}; {ending or 'exit code 0'}"}


def planaria_figures(work: Work) -> dict[str, Any]:
    """What the records of a run say, of the generation that had all workers."""
    events = read_lines(run_dir(work) / "events.jsonl")
    whole = {e["gen"] for e in events if e["event"] == "generation" and len(e["workers"]) == work.workers}
    rows = [row for row in read_lines(run_dir(work) / "metrics.jsonl") if row["gen"] in whole]
    if len({row["gen"] for row in rows}) > 1:
        raise ValueError("it was disturbed: more than one generation had all workers")
    parts = {
        key: statistics.median(row[key] for row in rows[WARM_UP:]) for key in ("data_wait_s", "snapshot_s") if rows
    }
    layout = {"layout": rows[0]["layout"]} if rows else {}
    return pace([Step(row["step"] + 1, row["time"], str(row["gen"])) for row in rows]) | parts | layout


def peer_figures(work: Work) -> dict[str, Any]:
    """What the trace of a peer says."""
    rows = read_lines(work.path / "steps.jsonl")
    found = pace([Step(row["step"], row["time"], row["inc"]) for row in rows])
    return found | {"layout": f"{rows[0]['world']} rank(s), FSDP2"}


def pace(steps: Sequence[Step]) -> dict[str, Any]:
    """Seconds per step after the warm-up: the mean, and the median.

    Raises:
        ValueError: there are too few steps.
    """
    times = [step.time for step in steps[WARM_UP - 1 :]]
    if len(times) <= LEAST:
        raise ValueError(f"only {len(steps)} undisturbed steps")
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = (times[-1] - times[0]) / len(gaps)
    return {"step_seconds": mean, "median_step_seconds": statistics.median(gaps), "steps": len(gaps)}


def build_report(rows: list[dict[str, Any]], work: Work, date: str) -> report.Report:
    """Medians, ratios and tables of the measured rows."""
    found = report.spread(ratios(rows, "step_seconds").values())
    figures = {} if found is None else {"overhead_vs_torchrun": found.median}
    for row in rows:
        if "ratio" in row:
            figures["metrics_overhead"] = row["ratio"]
    tables = (_pairs(rows), _comparison(rows), table_of_scrapes(rows), _absent(rows), _settings(work))
    return report.Report(
        name="overhead",
        title="Overhead of the controller",
        about=ABOUT.replace("\n", " "),
        machine=report.machine(date),
        versions=report.versions(),
        settings={"work": _work(work), "torchrun": bare.settings()},
        rows=rows,
        figures=figures,
        tables=[table for table in tables if table.rows],
    )


def ratios(rows: list[dict[str, Any]], key: str) -> dict[int, float]:
    """Planaria's value over the peer's, of every whole pair."""
    values = {(row["pair"], row["contender"]): row[key] for row in rows if key in row and "pair" in row}
    pairs = sorted({pair for pair, _ in values})
    whole = [pair for pair in pairs if all((pair, name) in values for name in NAMES)]
    return {pair: values[pair, "planaria"] / values[pair, "torchrun"] for pair in whole}


def _pairs(rows: list[dict[str, Any]]) -> report.Table:
    by_pair = {(row["pair"], row["contender"]): row for row in rows if "pair" in row}
    lines = [
        [
            str(pair),
            *(f"{by_pair[pair, name]['step_seconds']:.4f}" for name in NAMES),
            f"{found:.3f}",
            *(report.number(by_pair[pair, name]["load"]) for name in NAMES),
        ]
        for pair, found in ratios(rows, "step_seconds").items()
    ]
    columns = ("pair", *(f"{name}, s per step" for name in NAMES), "ratio", *(f"load, {name}" for name in NAMES))
    return report.Table("Pairs", columns, lines)


def _comparison(rows: list[dict[str, Any]]) -> report.Table:
    columns = {
        "s per step": "step_seconds",
        "median step": "median_step_seconds",
        "data wait": "data_wait_s",
        "snapshot": "snapshot_s",
    }
    lines = []
    for name in NAMES:
        spreads = [report.spread(row.get(key) for row in rows if row["contender"] == name) for key in columns.values()]
        layouts = {row["layout"] for row in rows if row["contender"] == name and "layout" in row}
        lines.append([name, *(_exact(found) for found in spreads), ", ".join(sorted(layouts)) or report.NOTHING])
    return report.Table("Step time", ("contender", *columns, "layout"), lines)


def _exact(found: report.Spread | None) -> str:
    return report.NOTHING if found is None else f"{found.median:.4f} ({found.low:.4f} to {found.high:.4f})"


def _absent(rows: list[dict[str, Any]]) -> report.Table:
    lines = [[row["contender"], str(row.get("pair", "")), row["absent"]] for row in rows if "absent" in row]
    return report.Table("Absent", ("contender", "pair", "reason"), lines)


def _work(work: Work) -> dict[str, Any]:
    job = work.job("bench")
    return {
        "ranks": work.workers,
        "nodes": work.nodes,
        "model": work.preset,
        "data": "scenes",
        "global_batch": work.global_batch,
        "micro_batch": work.micro_batch,
        "optimizer": "AdamW",
        "precision": "fp32",
        "sharding": "FSDP2 on gloo",
        "steps": work.steps,
        "snapshot_every": job.memory.every,
        "copies_on_other_nodes": job.memory.replicas,
        "checkpoint_every": work.checkpoint_every,
        "loaders": job.data.loaders,
    }


def _settings(work: Work) -> report.Table:
    trees = {"all": _work(work), "torchrun": bare.settings()}
    lines = [[name, key, str(value)] for name, tree in trees.items() for key, value in tree.items()]
    return report.Table("Settings", ("contender", "setting", "value"), lines)


if __name__ == "__main__":
    sys.exit(main())
