"""Control at scale: what decisions and plans take for a simulated fleet of 10,000 workers on 1,250 nodes.

``python jobs/bench/control.py [--rounds 3] [--quick] [--machines 1250] [--json FILE]``
"""

from __future__ import annotations

import argparse
import datetime
import signal
import sys
from typing import Any

from rich.console import Console

import _report as report
from _control.fleet import STEP_S, TP, WINDOW
from _control.replay import memory, replay

TRACES = ("random", "spot")
LIMIT_MS = 100.0
PER_MACHINE = 8
ABOUT = """\
No processes: the books of the controller (members, trust in nodes), every policy and the planner, under traces of
faults. `random`: independent losses, notices, crashes, hung and slow processes, wrong checksums. `spot`: synthetic, in
the shape of spot fleets: zones reclaimed in waves with two minutes' notice, racks that fail at once, machines that
come and go. Time is simulated; what the code takes is measured, garbage collection included. `decision`: one round of
the controller, from an event (or the reports of all ranks on a step) to the decision, the plan left out. `replan`: one
call of the planner, with the plan before. Single policies are part of a round. The events per second count one
word per worker and step, and the faults. Memory: Python objects of the books, by tracemalloc, in a run of its own."""


def main(arguments: list[str] | None = None) -> int:
    """Run, print, write; returns the exit code: 1 if a limit is exceeded."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rows = measure_all(options, Console(stderr=True))
    result = build_report(rows, options, datetime.date.today().isoformat())
    result.print()
    if options.json:
        result.write(options.json)
    return 0 if max(result.figures["decision_ms_p99"], result.figures["replan_ms_p99"]) < LIMIT_MS else 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Milliseconds per decision and plan for a large simulated fleet.")
    parser.add_argument("--rounds", type=int, default=3, help="seeds per trace (default: 3)")
    parser.add_argument("--quick", action="store_true", help="one seed and fewer faults, under a minute")
    parser.add_argument("--machines", type=int, default=1250, help="nodes of eight workers (default: 1250)")
    parser.add_argument("--faults", type=int, default=150, help="faults per trace, without returns (default: 150)")
    parser.add_argument("--seconds", type=float, default=3600.0, help="simulated length of a trace (default: 3600)")
    parser.add_argument("--json", metavar="FILE", help="write the report here")
    options = parser.parse_args(arguments)
    if min(options.rounds, options.machines, options.faults) < 1 or options.seconds < STEP_S:
        parser.error(f"--rounds, --machines and --faults must be at least 1, --seconds at least {STEP_S:g}")
    if options.quick:
        options.rounds, options.faults = 1, min(options.faults, 40)
        options.seconds = min(options.seconds, 600.0)
    return options


def measure_all(options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Every trace with every seed, in turns, then the memory."""
    rows: list[dict[str, Any]] = []
    for seed in range(1, options.rounds + 1):
        for name in TRACES:
            row = replay(name, options.machines, PER_MACHINE, options.faults, options.seconds, seed)
            rows.append(row)
            shown = ", ".join(f"{key} p99 {report.number(row['ms'][key]['p99'])} ms" for key in ("decision", "replan"))
            console.print(f"round {seed} of {options.rounds}: {name}: {shown}, {row['seconds']:.1f} s")
    rows.append(memory(options.machines, PER_MACHINE, max(1, options.faults // 4), options.seconds / 4, 1))
    return rows


def build_report(rows: list[dict[str, Any]], options: argparse.Namespace, date: str) -> report.Report:
    """Medians over the seeds; the figures are those of the slower trace."""
    runs = [row for row in rows if "ms" in row]
    held = next(row for row in rows if row["trace"] == "memory")

    def worst(key: str) -> float:
        return max(_spread(runs, name, key, "p99").median for name in TRACES)

    rates = [report.spread(row["events_per_s"] for row in runs if row["trace"] == name) for name in TRACES]
    figures = {
        "decision_ms_p99": worst("decision"),
        "replan_ms_p99": worst("replan"),
        "events_per_s": min(rate.median for rate in rates if rate is not None),
        "memory_mib": held["end_mib"],
    }
    settings = {
        "machines": options.machines,
        "workers": options.machines * PER_MACHINE,
        "tp": TP,
        "simulated seconds": options.seconds,
        "seconds per step": STEP_S,
        "steps per straggler window": WINDOW,
        "faults per trace, without returns": options.faults,
    }
    return report.Report(
        name="control",
        title="Control of a large fleet",
        about=ABOUT.replace("\n", " "),
        machine=report.machine(date),
        versions=report.versions(),
        settings=settings,
        rows=rows,
        figures=figures,
        tables=[_times(runs), _faults(runs), _memory(held), _settings(settings)],
    )


def _spread(runs: list[dict[str, Any]], name: str, key: str, figure: str) -> report.Spread:
    found = report.spread(row["ms"].get(key, {}).get(figure) for row in runs if row["trace"] == name)
    assert found is not None, f"{name} has no {key}"
    return found


def _times(runs: list[dict[str, Any]]) -> report.Table:
    keys = list(dict.fromkeys(key for row in runs for key in row["ms"]))
    first = ("decision", "replan")
    lines = []
    for key in [*first, *sorted(set(keys) - set(first))]:
        for name in TRACES:
            if any(key in row["ms"] for row in runs if row["trace"] == name):
                cells = [str(_spread(runs, name, key, figure)) for figure in ("count", "p50", "p99", "max")]
                lines.append([f"{key}, {name}", *cells])
    return report.Table("Milliseconds", ("what, trace", "calls", "median", "99th percentile", "maximum"), lines)


def _faults(runs: list[dict[str, Any]]) -> report.Table:
    kinds = list(dict.fromkeys(kind for row in runs for kind in row["books"]))
    lines = []
    for kind in kinds:
        found = [report.spread(row["books"].get(kind, 0) for row in runs if row["trace"] == name) for name in TRACES]
        lines.append([kind, *(str(item or report.NOTHING) for item in found)])
    rates = [report.spread(row["events_per_s"] for row in runs if row["trace"] == name) for name in TRACES]
    lines.append(["events per second", *(str(item or report.NOTHING) for item in rates)])
    return report.Table("What the fleets came through", ("what", *TRACES), lines)


def _memory(row: dict[str, Any]) -> report.Table:
    columns = ("when", "MiB")
    lines = [
        ["at the start", report.number(row["start_mib"])],
        [f"after {row['faults']} faults", report.number(row["end_mib"])],
        ["at the most", report.number(row["peak_mib"])],
    ]
    return report.Table("Memory of the books", columns, lines)


def _settings(settings: dict[str, Any]) -> report.Table:
    return report.Table("Settings", ("setting", "value"), [[key, str(value)] for key, value in settings.items()])


if __name__ == "__main__":
    sys.exit(main())
