"""Pipelines: measured bubbles beside the theory of their schedules, and balanced stages beside equal layers.

``python jobs/bench/pipeline.py [--rounds 3] [--quick] [--json FILE]``
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import signal
import statistics
import sys
from typing import Any

from rich.console import Console

import _report as report
from _pipeline.sleepers import SleeperRecipe, Times, steps
from planaria.layout import Layout
from planaria.parity.ranks import RankPool
from planaria.planner.bubble import simulate
from planaria.planner.schedules import Action, Kind, orders
from planaria.planner.stages import Unit, costs

ABOUT = """\
The engine trains a model whose layers sleep: they use no core, so eight ranks fit the machine, and what is measured is
the schedule with its messages (gloo), autograd and reductions; nothing is said about any accelerator. Bubble: share of
the ranks' time in which they do not work. Forward pass, gradient of the input and of the weights take equally long.
`theory`: the same order of work in the event simulator, without any overhead. `bubble_vs_theory`: the measured bubble
over that of the theory, in the worst case. Balance: a frozen vision tower of 32 layers of half a unit before 32 decoder
layers of one, on four ranks with 16 micro-batches and 1F1B; `balanced_stage_speedup`: step time with equal numbers of
layers over that with cuts that know costs and what is frozen (`planner/stages.py`)."""
CASES = (
    ("gpipe", 4, 1, 8),
    ("1f1b", 4, 1, 8),
    ("interleaved", 4, 2, 8),
    ("zero_bubble", 4, 1, 8),
    ("zero_bubble", 4, 2, 8),
    ("1f1b", 8, 1, 16),
    ("interleaved", 8, 2, 16),
    ("zero_bubble", 8, 1, 16),
)
"""Schedule, pipeline ranks, stages per rank, micro-batches."""
TOWER, DECODER, BALANCE_RANKS, BALANCE_MICROS = 32, 32, 4, 16


def main(arguments: list[str] | None = None) -> int:
    """Run, print, write."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rows = measure_all(options, Console(stderr=True))
    result = build_report(rows, options, datetime.date.today().isoformat())
    result.print()
    if options.json:
        result.write(options.json)
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Pipeline bubbles and balanced stages, measured.")
    parser.add_argument("--rounds", type=int, default=3, help="steps of each case (default: 3)")
    parser.add_argument("--unit", type=float, default=0.1, help="seconds of a stage's forward pass (default: 0.1)")
    parser.add_argument("--quick", action="store_true", help="shorter sleeps, two steps of each case: about a minute")
    parser.add_argument("--json", metavar="FILE", help="write the report here")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.unit <= 0:
        parser.error("--rounds must be at least 1 and --unit greater than 0")
    if options.quick:
        options.rounds, options.unit = min(options.rounds, 2), min(options.unit, 0.02)
    return options


def measure_all(options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """All cases, one after the other: each needs the machine's attention for its timers."""
    rows: list[dict[str, Any]] = []
    with RankPool(max(pp for _, pp, _, _ in CASES)) as pool:
        for schedule, pp, virtual, micros in CASES:
            rows.append(bubble(pool, schedule, pp, virtual, micros, options.unit, options.rounds))
            console.print(f"{schedule} on {pp} ranks: bubble {rows[-1]['bubble']:.3f}, theory {rows[-1]['theory']:.3f}")
        for name in ("equal layers", "balanced"):
            rows.append(balance(pool, name, options.unit / 6, options.rounds))
            console.print(f"{name}: {rows[-1]['median_s']:.2f} s per step, stages {rows[-1]['layers']}")
    return rows


def bubble(
    pool: RankPool, schedule: str, pp: int, virtual: int, micros: int, unit: float, rounds: int
) -> dict[str, Any]:
    """One schedule: stages of equal costs."""
    part = unit / virtual
    recipe = SleeperRecipe((Times(part, part, part),) * (pp * virtual), (1.0,) * (pp * virtual))
    seconds = _seconds(pool, recipe, Layout(pp=pp), schedule, virtual, micros, rounds)[1]

    def cost(action: Action) -> float:
        # The first stage needs no gradient of its input.
        backward = part if action.stage == 0 else 2 * part
        if action.kind is Kind.INPUT:
            return 0.0 if action.stage == 0 else part
        return backward if action.kind is Kind.BACKWARD else part

    ideal = simulate(orders(schedule, pp, virtual, micros), cost)
    work = sum(ideal.busy)
    return {
        "case": "bubble",
        "schedule": schedule,
        "pp": pp,
        "virtual": virtual,
        "micros": micros,
        "seconds": seconds,
        "bubble": 1 - work / (pp * statistics.median(seconds)),
        "theory": ideal.bubble,
    }


def balance(pool: RankPool, name: str, unit: float, rounds: int) -> dict[str, Any]:
    """A frozen tower before a decoder, cut in one of two ways."""
    tower = Times(unit / 2, unit / 2, unit / 2, trains=False)
    decoder = Times(unit, unit, unit)
    layers = (tower,) * TOWER + (decoder,) * DECODER
    weights = [1.0] * len(layers)
    if name == "balanced":
        weights = costs([Unit(layer.forward, layer.trains) for layer in layers])
    recipe = SleeperRecipe(layers, tuple(weights))
    bounds, seconds = _seconds(pool, recipe, Layout(pp=BALANCE_RANKS), "1f1b", 1, BALANCE_MICROS, rounds)
    held = [end - begin for begin, end in itertools.pairwise(bounds)]
    return {"case": name, "seconds": seconds, "median_s": statistics.median(seconds), "layers": held}


def _seconds(
    pool: RankPool, recipe: SleeperRecipe, layout: Layout, schedule: str, virtual: int, micros: int, rounds: int
) -> tuple[tuple[int, ...], list[float]]:
    answers = pool.run(layout, steps, recipe, schedule, virtual, micros, rounds)
    return answers[0][0], [max(times) for times in zip(*(taken for _, taken in answers), strict=True)]


def build_report(rows: list[dict[str, Any]], options: argparse.Namespace, date: str) -> report.Report:
    """Medians over the steps."""
    bubbles = [row for row in rows if row["case"] == "bubble"]
    cuts = {row["case"]: row for row in rows if row["case"] != "bubble"}
    figures = {
        "bubble_vs_theory": max(row["bubble"] / row["theory"] for row in bubbles),
        "balanced_stage_speedup": cuts["equal layers"]["median_s"] / cuts["balanced"]["median_s"],
    }
    settings = {"steps per case": options.rounds, "seconds of a stage's forward pass": options.unit}
    return report.Report(
        name="pipeline",
        title="Pipeline schedules and stages",
        about=ABOUT.replace("\n", " "),
        machine=report.machine(date),
        versions=report.versions(),
        settings=settings,
        rows=rows,
        figures=figures,
        tables=[_bubbles(bubbles), _balance(cuts)],
    )


def _bubbles(rows: list[dict[str, Any]]) -> report.Table:
    columns = ("schedule", "ranks", "stages per rank", "micro-batches", "step s", "bubble", "theory")
    lines = []
    for row in rows:
        counts = [str(row[key]) for key in ("pp", "virtual", "micros")]
        shares = [report.number(row[key]) for key in ("bubble", "theory")]
        lines.append([row["schedule"], *counts, str(report.spread(row["seconds"])), *shares])
    return report.Table("Bubbles", columns, lines)


def _balance(cuts: dict[str, dict[str, Any]]) -> report.Table:
    lines = [
        [name, str(report.spread(row["seconds"])), " ".join(map(str, row["layers"]))] for name, row in cuts.items()
    ]
    return report.Table("A frozen tower before a decoder", ("stages", "step s", "layers per stage"), lines)


if __name__ == "__main__":
    sys.exit(main())
