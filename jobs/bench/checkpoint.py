"""Checkpoints: how long training stands still for one, how fast it becomes durable, how fast another layout loads it.

``python jobs/bench/checkpoint.py [--rounds 5] [--quick] [--only "dcp save"] [--json FILE]``
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

import _report as report
from _checkpoint import loads, saves, seaweed, steps
from _checkpoint.pool import Absent, Pool
from _checkpoint.work import Work
from _runs import scratch
from planaria.layout import Layout

QUICK_S = 170.0
SOURCES = {"dp4": saves.SAVED, "tp2 x pp2": Layout(pp=2, tp=2)}
DCP_MODES = ("dcp save", "dcp async thread", "dcp async process")
SAVES = tuple(saves.CONTENDERS)
LOADS = tuple(loads.CONTENDERS)
STEPS = tuple(steps.EVERY)
PAIRS, PAIR_S = 3, 240.0
ABOUT = """\
Parameters and both moments of a small decoder in float32, held as FSDP2 shards by four processes on gloo. `stall`:
seconds for which the slowest rank's training thread stands still per checkpoint. `durable`: seconds until the
checkpoint is durable (fsync, commit). For the asynchronous modes of torch.distributed.checkpoint (DCP) the stall is
the time until `async_save` returns; nothing else runs until they are done. Planaria's stall is the copy of a snapshot
into shared memory; the vault is written from there by the node's keeper while training goes on. `memcpy` copies the
same bytes into memory that was touched before; `disk` writes them to one file per rank, with fsync. Loading: three
processes read what four wrote in another layout, from the page cache into memory that was touched before; Planaria
verifies every block; `raw` reads as many bytes without looking at them, in large calls. Steps: the demo's model on a
local cluster, time from step to step once it runs steadily. Contenders run one at a time, in turns; the first round
of each (allocations, connections) does not count. Figures are ratios of medians."""


def main(arguments: list[str] | None = None) -> int:
    """Run, print, write; returns the exit code."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    work = Work(layers=2) if options.quick else Work()
    rows = measure_all(options, work, Console(stderr=True))
    result = build_report(rows, work, datetime.date.today().isoformat())
    result.print()
    if options.json:
        result.write(options.json)
    ours = [row for row in rows if row["contender"].startswith("planaria") and "s3" not in row["contender"]]
    return 0 if all("absent" not in row for row in ours) else 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Stall and rate of checkpoints, and of loading them.")
    parser.add_argument("--rounds", type=int, default=5, help="measured runs of every contender (default: 5)")
    parser.add_argument(
        "--quick", action="store_true", help="a quarter of the state, three rounds, under three minutes"
    )
    parser.add_argument(
        "--only", action="append", choices=[*SAVES, *LOADS, *STEPS], help="run only these; may be repeated"
    )
    parser.add_argument("--json", metavar="FILE", help="write the report here")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if options.quick:
        options.rounds = min(options.rounds, 3)
    return options


def measure_all(options: argparse.Namespace, work: Work, console: Console) -> list[dict[str, Any]]:
    """Every contender in every round, in turns."""
    deadline = time.monotonic() + QUICK_S if options.quick else float("inf")
    rows: list[dict[str, Any]] = []
    with scratch() as (folder, environment), contextlib.ExitStack() as stack:
        absent: dict[str, str] = {}
        chosen = [name for name in SAVES if not options.only or name in options.only]
        if "planaria vault on s3" in chosen:
            try:
                environment = environment | stack.enter_context(seaweed.server(folder / "s3", environment))
            except Absent as error:
                absent["planaria vault on s3"] = str(error)
        bench = _Bench(folder, environment, options.rounds, deadline, console)
        rows += bench.saves(work, chosen, absent)
        rows += bench.loads(work, [name for name in LOADS if not options.only or name in options.only])
        pairs = 1 if options.quick else PAIRS
        rows += bench.steps(pairs, [name for name in STEPS if not options.only or name in options.only])
    return rows


class _Bench:
    def __init__(
        self, folder: Path, environment: Mapping[str, str], rounds: int, deadline: float, console: Console
    ) -> None:
        self._folder, self._environment, self._rounds = folder, environment, rounds
        self._deadline, self._console = deadline, console

    def saves(self, work: Work, names: list[str], absent: dict[str, str]) -> list[dict[str, Any]]:
        """The sources of :meth:`loads`, then one checkpoint by every contender in every round."""
        rows: list[dict[str, Any]] = []
        pool = self._pool(saves.SAVED.world)
        try:
            for layout in SOURCES.values():
                pool.run(saves.save_sources, work, str(self._folder), layout)
            pool.run(saves.hold, work)
            for turn in range(self._rounds + 1):  # the first to warm up
                shift = turn % max(1, len(names))  # nobody is always first, on a machine that warms up or fills
                for name in names[shift:] + names[:shift]:
                    row: dict[str, Any] = {"contender": name, "round": turn}
                    try:
                        self._check(absent.get(name))
                        answers = pool.run(saves.measure, name, self._place(name), 10 + turn)
                        row |= {key: max(answer[key] for answer in answers) for key in answers[0]}
                    except Absent as error:
                        absent[name] = row["absent"] = str(error)
                        if "did not answer" in str(error) or "died" in str(error):
                            pool.close()
                            pool = self._pool(saves.SAVED.world)
                            pool.run(saves.hold, work)
                    rows += self._note(row, turn > 0 or "absent" in row)
        finally:
            pool.close()
        return rows

    def loads(self, work: Work, names: list[str]) -> list[dict[str, Any]]:
        """One load by every contender in every round, from every source."""
        rows: list[dict[str, Any]] = []
        pool = self._pool(loads.LOADED.world)
        try:
            nbytes = sum(pool.run(loads.hold, work))
            for turn in range(self._rounds + 1):
                shift = turn % max(1, len(names))
                for source, layout in SOURCES.items():
                    for name in names[shift:] + names[:shift]:
                        row: dict[str, Any] = {"contender": f"{name}, {source}", "round": turn}
                        try:
                            self._check(None)
                            took = max(pool.run(loads.measure, name, f"{self._folder}/{layout}", turn == 0))
                            row |= {"load": took, "bytes": nbytes}
                        except Absent as error:
                            row["absent"] = str(error)
                        rows += self._note(row, turn > 0 or "absent" in row)
        finally:
            pool.close()
        return rows

    def steps(self, pairs: int, names: list[str]) -> list[dict[str, Any]]:
        """Runs of the demo's job, in turns, each pair on a cluster of its own."""
        rows: list[dict[str, Any]] = []
        for turn in range(1, pairs + 1 if names else 1):
            order = names if turn % 2 else names[::-1]
            found: dict[str, Any] = {}
            try:
                self._check(None)
                limit_s = min(PAIR_S, self._deadline - time.monotonic())
                folder = self._folder / f"steps-{turn}"
                found = {
                    name: {"step": seconds}
                    for name, seconds in steps.measure(folder, self._environment, order, limit_s).items()
                }
            except Absent as error:
                found = {name: {"absent": str(error)} for name in names}
            for name in order:
                rows += self._note({"contender": name, "round": turn, **found[name]}, True)
        return rows

    def _pool(self, world: int) -> Pool:
        return Pool(world, self._folder, self._environment)

    def _place(self, name: str) -> str:
        if name == "planaria vault on s3":
            return f"s3://{seaweed.BUCKET}/run"
        return str(self._folder / "saves" / name.replace(" ", "-"))

    def _check(self, reason: str | None) -> None:
        if reason is not None:
            raise Absent(reason)
        if time.monotonic() > self._deadline:
            raise Absent(f"no time left of the {QUICK_S:.0f} s of --quick")

    def _note(self, row: dict[str, Any], counts: bool) -> list[dict[str, Any]]:
        shown = {key: report.number(row[key]) for key in ("stall", "durable", "load", "step") if key in row}
        self._console.print(f"round {row['round']}: {row['contender']}: {row.get('absent') or shown}")
        return [row] if counts else []


def build_report(rows: list[dict[str, Any]], work: Work, date: str) -> report.Report:
    """Medians, ratios and tables of the measured rows."""
    names = list(dict.fromkeys(row["contender"] for row in rows))
    stall = {name: report.spread(_values(rows, name, "stall")) for name in names}
    durable = {name: report.spread(_values(rows, name, "durable")) for name in names}
    load = {name: report.spread(_values(rows, name, "load")) for name in names}
    modes = [found for name in DCP_MODES if (found := stall.get(name)) is not None]
    best = min(modes, key=lambda found: found.median, default=None)
    ours = stall.get("planaria memory")
    figures = {
        "stall_vs_memcpy": report.ratio(ours, stall.get("memcpy")),
        "stall_vs_best_dcp": report.ratio(ours, best),
        "vault_write_vs_disk": report.ratio(durable.get("disk"), durable.get("planaria vault")),
    }
    reshard = [report.ratio(load.get(f"raw, {source}"), load.get(f"planaria, {source}")) for source in SOURCES]
    if known := [value for value in reshard if value is not None]:
        figures["reshard_load_vs_disk"] = min(known)
    step = {name: report.spread(_values(rows, name, "step")) for name in names}
    overhead = report.ratio(step.get("steps with snapshots"), step.get("steps without snapshots"))
    figures["snapshot_step_overhead"] = overhead
    return report.Report(
        name="checkpoint",
        title="Checkpoints",
        about=ABOUT.replace("\n", " "),
        machine=report.machine(date),
        versions=report.versions(),
        settings={"work": _work(work), "dcp": DCP_SETTINGS},
        rows=rows,
        figures={name: value for name, value in figures.items() if value is not None},
        tables=[
            table
            for table in (
                _save_table(names, stall, durable, work),
                _load_table(names, load, work),
                _step_table(names, step),
                _absent(rows),
                _settings(work),
            )
            if table.rows
        ],
    )


DCP_SETTINGS = {
    "storage": "FileSystemWriter: one file and one thread per rank, fsync (two threads were not faster)",
    "planner": "DefaultSavePlanner(enable_plan_caching=True)",
    "async thread and process": "DefaultStager(use_shared_memory=True) whose memory is kept, a gloo group of its own "
    "(BlockingAsyncStager was slower without its cache, and its cache wants an accelerator)",
    "load": "FileSystemReader, into DTensors",
}


def _values(rows: list[dict[str, Any]], name: str, key: str) -> list[float | None]:
    return [row.get(key) for row in rows if row["contender"] == name]


def _rate(nbytes: int, seconds: report.Spread | None) -> str:
    return report.number(nbytes / seconds.median / 1e9) if seconds is not None else report.NOTHING


def _save_table(names: list[str], stall: Mapping[str, Any], durable: Mapping[str, Any], work: Work) -> report.Table:
    lines = [
        [
            name,
            str(stall[name] or report.NOTHING),
            _rate(work.nbytes, stall[name]),
            str(durable[name] or report.NOTHING),
            _rate(work.nbytes, durable[name]),
        ]
        for name in names
        if stall[name] is not None or durable[name] is not None
    ]
    columns = ("contender", "stall, s", "stalled at, GB/s", "durable after, s", "durable at, GB/s")
    return report.Table(f"One checkpoint of {work.nbytes / 1e9:.2f} GB by four ranks", columns, lines)


def _load_table(names: list[str], load: Mapping[str, Any], work: Work) -> report.Table:
    lines = [[name, str(load[name]), _rate(work.nbytes, load[name])] for name in names if load[name] is not None]
    return report.Table("Loading into dp3", ("contender, source", "seconds", "GB/s"), lines)


def _step_table(names: list[str], step: Mapping[str, Any]) -> report.Table:
    lines = [[name, str(step[name])] for name in names if step[name] is not None]
    title = f"Steps of the demo's job by {steps.WORKERS} workers; a snapshot after every step, or none"
    return report.Table(title, ("contender", "s per step"), lines)


def _absent(rows: list[dict[str, Any]]) -> report.Table:
    reasons = {row["contender"]: row["absent"] for row in rows if "absent" in row}
    return report.Table("Absent", ("contender", "reason"), [list(item) for item in reasons.items()])


def _work(work: Work) -> dict[str, Any]:
    return {
        "state": f"{len(work.tensors())} tensors of float32: {work.layers} layers of 8, parameters and two moments",
        "hidden": work.hidden,
        "inner": work.inner,
        "bytes": work.nbytes,
        "saved by": "4 ranks on one machine, gloo",
        "loaded by": "3 ranks",
    }


def _settings(work: Work) -> report.Table:
    trees = {"all": _work(work), "dcp": DCP_SETTINGS}
    lines = [[name, key, str(value)] for name, tree in trees.items() for key, value in tree.items()]
    return report.Table("Settings", ("contender", "setting", "value"), lines)


if __name__ == "__main__":
    sys.exit(main())
