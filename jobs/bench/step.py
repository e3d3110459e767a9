"""Step time and peak memory of the engine by layout, beside bare references on the same work.

``python jobs/bench/step.py [--rounds 8] [--quick] [--only NAME] [--json FILE]``
"""

from __future__ import annotations

import argparse
import datetime
import signal
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console

import _report as report
from _checkpoint.pool import Absent, Pool
from _peers.work import Work
from _runs import load, scratch
from _step import ranks

RANKS = 2
BURST = ranks.BATCHES
"""Steps of one contender before it is another one's turn."""
QUICK_S = 170.0
SHARDED, REPLICATED = "planaria dp_shard2", "planaria dp_replicate2"
GROUPS = {
    "sharded": (SHARDED, "fsdp2", "deepspeed"),
    "replicated": (REPLICATED, "ddp", "accelerate"),
    "recompute": (SHARDED, f"{SHARDED} unit", f"{SHARDED} selective"),
}
"""Contenders that take turns, the one that all others are compared with first."""
FIGURES = {
    "step_vs_fsdp2": ("sharded", "fsdp2"),
    "step_vs_deepspeed": ("sharded", "deepspeed"),
    "step_vs_ddp": ("replicated", "ddp"),
    "step_vs_accelerate": ("replicated", "accelerate"),
}
SETTINGS = {
    "planaria": "the native engine as a worker runs it, without worker, loaders and controller",
    "fsdp2": "a script: fully_shard over the same units, gradients summed at the last micro-batch",
    "ddp": "a script: DistributedDataParallel, no_sync() but for the last micro-batch",
    "accelerate": "Accelerator(cpu=True).prepare(), which is DDP inside; no_sync() but for the last micro-batch",
    "deepspeed": "ZeRO stage 3, torch's AdamW",
}
ABOUT = """\
The same model class, global batches, micro-batches and optimizer on two ranks and gloo. Contenders live at the same
time, each in processes of its own, and take turns with bursts of four steps, in changing order, as the load that other
programs put on the machine changes; batches are made beforehand. A ratio is the median, over the rounds, of Planaria's
time over the other one's in the same round. `peak memory`: the most that rank 0 held during its steps beyond what it
held before it had a model. `recompute` compares the engine with itself on larger micro-batches: activations that are
computed again (`train.recompute`) beside those that are kept."""


def main(arguments: list[str] | None = None) -> int:
    """Run, print, write; returns the exit code."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rows = measure_all(options, Console(stderr=True))
    result = build_report(rows, datetime.date.today().isoformat())
    result.print()
    if options.json:
        result.write(options.json)
    return 0 if all("absent" not in row for row in rows if row["contender"].startswith("planaria")) else 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Step time and memory beside bare references.")
    parser.add_argument("--rounds", type=int, default=8, help="measured bursts of every contender (default: 8)")
    parser.add_argument("--quick", action="store_true", help="two rounds, under three minutes")
    parser.add_argument("--only", action="append", choices=[*GROUPS], help="run only these; may be repeated")
    parser.add_argument("--json", metavar="FILE", help="write the report here")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if options.quick:
        options.rounds = min(options.rounds, 2)
    return options


def work_of(group: str) -> Work:
    """What the contenders of a group train; in ``recompute`` all samples of a rank at once: activations count then."""
    return Work("", nodes=RANKS, global_batch=32, micro_batch=16 if group == "recompute" else 8, kill_after=0)


def measure_all(options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """All rounds of all groups."""
    deadline = time.monotonic() + QUICK_S if options.quick else float("inf")
    rows: list[dict[str, Any]] = []
    with scratch() as (folder, environment):
        for group, names in GROUPS.items():
            if not options.only or group in options.only:
                rows += _take_turns(group, names, options.rounds, deadline, folder, environment, console)
    return rows


def _take_turns(
    group: str,
    names: tuple[str, ...],
    rounds: int,
    deadline: float,
    folder: Path,
    environment: dict[str, str],
    console: Console,
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    pools: dict[str, Pool] = {}

    def drop(name: str, error: Absent) -> None:
        rows.append({"group": group, "contender": name, "absent": str(error)})
        console.print(f"{group}: {name}: absent: {error}")
        if name in pools:
            pools.pop(name).close()

    try:
        for name in names:
            try:
                if time.monotonic() > deadline:
                    raise Absent(f"no time left of the {QUICK_S:.0f} s of --quick")
                pools[name] = Pool(RANKS, folder, environment)
                pools[name].run(ranks.hold, name, work_of(group))
                pools[name].run(ranks.steps, BURST)  # allocates, compiles, finds its batches in the caches
            except Absent as error:
                drop(name, error)
        for turn in range(1, rounds + 1):
            shift = turn % len(names)
            for name in [name for name in names[shift:] + names[:shift] if name in pools]:
                try:
                    answers = pools[name].run(ranks.steps, BURST)
                except Absent as error:
                    drop(name, error)
                    continue
                row = {"group": group, "round": turn, "contender": name, "load": load()}
                # All wait for the slowest; the memory of the ranks differs by no more than padding.
                row |= answers[0] | {"step": max(answer["step"] for answer in answers)}
                console.print(f"{group} {turn}: {name}: {report.number(row['step'])} s per step")
                rows.append(row)
            if time.monotonic() > deadline:
                break
    finally:
        for pool in pools.values():
            pool.close()
    return rows


def build_report(rows: list[dict[str, Any]], date: str) -> report.Report:
    """Medians, ratios and tables of the measured rows."""
    figures = {}
    for figure, (group, peer) in FIGURES.items():
        if found := list(ratios(rows, group, GROUPS[group][0], peer)):
            figures[figure] = statistics.median(found)
    tables = [_table(rows, group) for group in GROUPS] + [_absent(rows), _settings()]
    return report.Report(
        name="step",
        title="One step, by layout",
        about=ABOUT.replace("\n", " "),
        machine=report.machine(date),
        versions=report.versions() | _peer_versions(),
        settings={"work": {group: _work(group) for group in GROUPS}, "contenders": SETTINGS},
        rows=rows,
        figures=figures,
        tables=[table for table in tables if table.rows],
    )


def ratios(rows: list[dict[str, Any]], group: str, ours: str, other: str) -> Iterable[float]:
    """Step time of ``ours`` over that of ``other``, in every round that has both."""
    times = {(row["round"], row["contender"]): row["step"] for row in rows if row["group"] == group and "step" in row}
    for turn in sorted({turn for turn, _ in times}):
        if (turn, ours) in times and (turn, other) in times:
            yield times[turn, ours] / times[turn, other]


def _table(rows: list[dict[str, Any]], group: str) -> report.Table:
    lines = []
    first = GROUPS[group][0]
    for name in GROUPS[group]:
        own = [row for row in rows if row["group"] == group and row["contender"] == name and "step" in row]
        if not own:
            continue
        memory = report.spread(row["memory"] for row in own)
        ratio = report.spread(ratios(rows, group, first, name))
        lines.append(
            [
                name,
                _exact(report.spread(row["step"] for row in own)),
                report.NOTHING if name == first else _exact(ratio),
                report.NOTHING if memory is None else report.number(memory.high),
                str(report.spread(row["load"] for row in own)),
            ]
        )
    columns = ("contender", "s per step", f"{first} / this", "peak memory, MiB", "load")
    batch = work_of(group)
    return report.Table(
        f"{group.capitalize()}: global batch {batch.global_batch}, micro-batch {batch.micro_batch}", columns, lines
    )


def _exact(found: report.Spread | None) -> str:
    return report.NOTHING if found is None else f"{found.median:.3f} ({found.low:.3f} to {found.high:.3f})"


def _absent(rows: list[dict[str, Any]]) -> report.Table:
    lines = [[row["contender"], row["group"], row["absent"]] for row in rows if "absent" in row]
    return report.Table("Absent", ("contender", "group", "reason"), lines)


def _work(group: str) -> dict[str, Any]:
    work = work_of(group)
    batch = {"global_batch": work.global_batch, "micro_batch": work.micro_batch}
    return {"ranks": RANKS, "model": work.preset, "data": "scenes", "precision": "fp32", "optimizer": "AdamW"} | batch


def _settings() -> report.Table:
    lines = [["all", key, str(value)] for key, value in _work("sharded").items()]
    lines += [[name, "what", text] for name, text in SETTINGS.items()]
    return report.Table("Settings", ("contender", "setting", "value"), lines)


def _peer_versions() -> dict[str, str]:
    from importlib import metadata

    found = {}
    for name in ("accelerate", "deepspeed"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


if __name__ == "__main__":
    sys.exit(main())
