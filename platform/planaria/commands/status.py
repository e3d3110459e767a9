"""``planaria status``: what the files of a run say, while it runs, after it ended, or after it crashed."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planaria.commands.failures import UsageError
from planaria.observe.record import read_lines

QUIET_S = 60.0
"""A run that is not over and has written nothing for this long may have crashed."""
SUMMARY_KEYS = {"state", "steps", "loss", "seconds", "generations", "checkpoint_step", "bad_samples", "run_dir"}
ENDED = ("finished", "stopped", "failed")


@dataclass
class RunState:
    """What is known of a run. ``generations`` has the form of the controller's table."""

    state: str
    step: int = 0
    total_steps: int | None = None
    loss: float | None = None
    losses: list[float] = field(default_factory=list)
    quiet_s: float | None = None
    """Seconds since the last line was written; None once the run is over."""
    generations: list[dict[str, Any]] = field(default_factory=list)
    attempts: int = 1
    """How many times the job was started in this folder."""
    checkpoint_step: int | None = None
    bad_samples: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] | None = None
    nodes: list[dict[str, Any]] = field(default_factory=list)
    """Nodes that were quarantined, as far as they are on record."""
    goodput: dict[str, float] | None = None
    """Where the wall time went, as of the last row that was written."""


def read_run(run_dir: str | Path, now: float | None = None) -> RunState:
    """Put together what events, metrics and summary say of the latest start of the job in ``run_dir``.

    Torn and foreign lines are left out: a killed writer leaves them.

    Raises:
        UsageError: this is no run directory.
    """
    folder = Path(run_dir)
    if not folder.is_dir():
        raise UsageError(f"{run_dir}: no such folder; give a run directory, i.e. the job's storage and name")
    if not (folder / "events.jsonl").is_file():
        raise UsageError(f"{run_dir}: holds no events.jsonl, so it is not a run directory (or nothing began there yet)")
    events = [row for row in _rows(folder / "events.jsonl") if isinstance(row.get("event"), str)]
    metrics = [row for row in _rows(folder / "metrics.jsonl") if isinstance(row.get("step"), int)]

    begun = [at for at, row in enumerate(events) if row["event"] == "generation" and row.get("gen") == 1]
    attempts = max(1, len(begun))
    # An attempt begins behind the end of the one before it.
    ends = [at for at, row in enumerate(events) if row["event"] == "state" and row.get("to") in ENDED]
    start = begun[-1] if begun else 0
    if ends and begun and ends[-1] > start:
        later = events[ends[-1] + 1 :]
        if any(row["event"] == "joined" for row in later):  # started once more, no generation yet
            start, attempts = ends[-1] + 1, attempts + 1
    current = events[start:]
    since = float(current[0].get("time", 0.0)) if current else 0.0
    rows = [row for row in metrics if float(row.get("time", 0.0)) >= since]

    states = [row.get("to") for row in current if row["event"] == "state"]
    run = RunState(state=str(states[-1]) if states else "waiting", attempts=attempts)
    run.events = [row for row in events if row["event"] != "state" and row.get("text")]
    run.generations = _generations(current, rows)
    run.checkpoint_step = next((row.get("step") for row in reversed(events) if row["event"] == "checkpoint"), None)
    run.bad_samples = sum(row["event"] == "bad_sample" for row in current)
    latest = rows or metrics
    if latest:
        run.step, run.loss = latest[-1]["step"] + 1, latest[-1].get("loss")
        run.losses = [row["loss"] for row in latest if isinstance(row.get("loss"), float)]
    job = _object(folder / "job.json") or {}
    run.total_steps = job.get("train", {}).get("steps")
    over = run.state in ENDED
    summary = _object(folder / "summary.json")
    if over and summary is not None and summary.keys() >= SUMMARY_KEYS:
        run.summary = summary
        run.step = max(run.step, int(summary.get("steps", 0)))
    accounts = [row for row in _rows(folder / "goodput.jsonl") if float(row.get("time", 0.0)) >= since]
    closing = (run.summary or {}).get("goodput")
    run.goodput = _account(closing) or next((found for row in reversed(accounts) if (found := _account(row))), None)
    run.nodes = _quarantines(current, time.time() if now is None else now)
    if not over:
        written = [float(row["time"]) for row in (*current[-1:], *rows[-1:]) if "time" in row]
        run.quiet_s = max(0.0, (time.time() if now is None else now) - max(written)) if written else None
    return run


def _account(tree: Any) -> dict[str, float] | None:
    """An account of wall time, if it is one."""
    if not isinstance(tree, dict):
        return None
    known = {name: float(value) for name, value in tree.items() if name != "time" and isinstance(value, (int, float))}
    return known if known.keys() >= {"productive", "wall", "goodput"} else None


def verdict(run: RunState) -> str:
    """The state in words, with what a reader should make of it."""
    if run.quiet_s is not None and run.quiet_s > QUIET_S:
        return f"{run.state}, but nothing was written for {_age(run.quiet_s)}: it has crashed or hangs"
    return run.state


def draw(run_dir: str, target: str) -> None:
    """Write a picture of the run (SVG): loss over steps, generations, faults."""
    from planaria.observe.picture import run_svg

    folder = Path(run_dir)
    picture = run_svg(_rows(folder / "metrics.jsonl"), _rows(folder / "events.jsonl"), folder.name)
    try:
        Path(target).write_text(picture, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--picture {target}: cannot be written ({error.strerror})") from None


def status(run_dir: str, last: int, picture: str | None = None) -> int:
    """Print the state of a run, its generations and its ``last`` events; draw it to ``picture`` if given."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from planaria.observe import text as as_text
    from planaria.observe.view import encodable, generation_table, goodput_table, is_plain, summary_lines

    run = read_run(run_dir)
    if picture is not None:
        draw(run_dir, picture)
    console = Console(highlight=False)
    plain = is_plain(console)
    fields: list[tuple[str, str]] = [("state", verdict(run))]
    if run.attempts > 1:
        fields.append(("started", f"{run.attempts} times; the latest is shown"))
    if run.summary is not None:
        fields += [(label, value) for label, value in summary_lines(run.summary) if label != "outcome"]
    else:
        of = f" of {run.total_steps}" if run.total_steps else ""
        fields.append(("step", f"{run.step}{of}"))
        fields.append(("loss", as_text.number(run.loss)))
        goodput = as_text.goodput_text(run.goodput)
        if goodput is not None:
            fields.append(("goodput", goodput))
        fields.append(("checkpoint", "none" if run.checkpoint_step is None else f"step {run.checkpoint_step}"))
        held = as_text.quarantine_text(run.nodes)
        if held is not None:
            fields.append(("quarantined", held))
        if run.bad_samples:
            fields.append(("bad samples", str(run.bad_samples)))
    curve = as_text.sparkline(run.losses, 48, plain=plain)
    if curve:
        fields.append(("loss curve", curve))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in fields:
        grid.add_row(label, Text(encodable(value, console.encoding)))
    console.print(grid)
    if run.generations:
        console.print()
        console.print(generation_table(run.generations, width=console.width, plain=plain))
    if run.goodput is not None and run.goodput["wall"] > 0:
        console.print()
        console.print(goodput_table(run.goodput, plain=plain))
    if last > 0 and run.events:
        console.print("\nlast events", style="bold")
        for row in run.events[-last:]:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(row.get("time", 0))))
            console.print(Text(encodable(f"{stamp}  {row['text']}", console.encoding)), soft_wrap=True)
    return 0


def _generations(events: Sequence[Mapping[str, Any]], metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    rows: dict[int, dict[str, Any]] = {}
    for event in events:
        number = event.get("gen")
        if event["event"] == "generation" and isinstance(number, int):
            first = int(event.get("step") or 0)
            rows[number] = {
                "generation": number,
                "layout": str(event.get("layout", "-")),
                "workers": len(event.get("workers", ())),
                "spares": len(event.get("spares", ())),
                "cause": str(event.get("cause", "-")),
                "from_step": first,
                "to_step": first,
                "recovery_s": None,
            }
        elif event["event"] == "recovered" and number in rows:
            rows[number]["recovery_s"] = event.get("seconds")
    for row in metrics:
        if row.get("gen") in rows:
            known = rows[row["gen"]]
            known["to_step"] = max(known["to_step"], row["step"] + 1)
    return list(rows.values())


def _quarantines(events: Sequence[Mapping[str, Any]], now: float) -> list[dict[str, Any]]:
    """Rows like the controller's own, from its events."""
    found: dict[str, dict[str, Any]] = {}
    for event in events:
        if event["event"] == "quarantined" and isinstance(event.get("node"), str):
            left_s = float(event.get("time", 0.0)) + float(event.get("seconds", 0.0)) - now
            times = found.get(event["node"], {"times": 0})["times"] + 1
            reason = str(event.get("reason") or event.get("text", ""))
            found[event["node"]] = {
                "node": event["node"],
                "quarantined": left_s > 0,
                "seconds_left": max(0.0, left_s),
                "times": times,
                "reason": reason,
            }
    return list(found.values())


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        return [row for row in read_lines(path) if isinstance(row, dict)]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None


def _object(path: Path) -> dict[str, Any] | None:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return tree if isinstance(tree, dict) else None


def _age(seconds: float) -> str:
    from planaria.observe.text import duration

    return duration(seconds)
