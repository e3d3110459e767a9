"""What the files of a run show of it, in the form in which a controller tells it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planaria.commands.status import RunState, read_run
from planaria.observe.record import read_lines

LOSSES, STEPS = 160, 20
KINDS = ("worker", "loader", "keeper", "standby")


def look_at_folder(run_dir: str, now: float) -> dict[str, Any]:
    """Like :func:`planaria.control.summary.look`; what no file holds is left empty.

    Args:
        run_dir: the job's storage and name.
        now: ``time.time()``.

    Raises:
        UsageError: this is no run directory.
    """
    run = read_run(run_dir, now)
    events = [row for row in run.events if isinstance(row.get("time"), (int, float))]
    processes = list(members(events, run, now).values())
    newest = run.generations[-1] if run.generations else None
    rows = [row for row in _tail(Path(run_dir) / "metrics.jsonl") if isinstance(row.get("step_s"), (int, float))]
    status = {
        "state": run.state,
        "step": run.step,
        "total_steps": run.total_steps or 0,
        "loss": run.loss,
        "generation": newest["generation"] if newest else 0,
        "layout": newest["layout"] if newest else "",
        "workers": newest["workers"] if newest else 0,
        "ready": sum(row["kind"] == "worker" and row["life"] == "ready" for row in processes),
        "checkpoint_step": run.checkpoint_step,
        "bad_samples": run.bad_samples,
        "last_event": events[-1]["text"] if events else "",
        "generations": run.generations,
        "goodput": run.goodput,
        "nodes": run.nodes,
        "memory": {},
        "tokens_per_s": None,
        "step_s": statistics.fmean(row["step_s"] for row in rows[-STEPS:]) if rows else 0.0,
        "final": run.quiet_s is None,
    }
    began = min((row["time"] for row in events), default=now)
    return {
        "name": Path(run_dir).resolve().name,
        "run_dir": run_dir,
        "began": began,
        "ended": events[-1]["time"] if events and run.quiet_s is None else None,
        "quiet_s": run.quiet_s,
        "status": status,
        "losses": run.losses[-LOSSES:],
        "events": [(row["time"], row["event"], str(row["text"])) for row in events[-40:]],
        "processes": processes,
    }


def members(events: Sequence[Mapping[str, Any]], run: RunState, now: float) -> dict[str, dict[str, Any]]:
    """Processes that came up, by name, with what became of them; of a run that is over all are gone."""
    found: dict[str, dict[str, Any]] = {}
    ranks: dict[str, int] = {}
    for row in events:
        ident = row.get("member")
        if row["event"] == "generation":
            ranks = {name: rank for rank, name in enumerate(row.get("workers") or ())}
        elif row["event"] == "joined" and isinstance(ident, str) and ident.rpartition("-")[0] in KINDS:
            kind = ident.rpartition("-")[0]
            found[ident] = {"kind": kind, "ident": ident, "node": row.get("node", "-"), "life": "ready"}
            found[ident]["since_s"] = max(0.0, now - row["time"])
        elif row["event"] == "promoted" and ident in found:
            found[str(ident)]["kind"] = "worker"
        elif row["event"] in ("lost", "dismissed") and ident in found:
            found[str(ident)] |= {"life": "lost", "since_s": max(0.0, now - row["time"])}
    for ident, row in found.items():
        row["rank"] = ranks.get(ident) if row["life"] == "ready" else None
    return {} if run.quiet_s is None else found


def _tail(path: Path, most: int = 1 << 16) -> list[dict[str, Any]]:
    """The rows in the last bytes of a file, which may be long."""
    try:
        return read_lines(path, max(0, path.stat().st_size - most))
    except OSError:
        return []
