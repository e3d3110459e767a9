"""What a controller that returns must know of the time before: pure reading of the journal's rows.

The journal is a file of JSON lines beside the run's other records. Every row is written before what it tells of is
done, so a controller that is killed between the two finds a member that never came up or a generation that was never
ordered, which it handles like any that was lost; never one that it does not know of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from planaria.control import policies as policy
from planaria.control.generation import Generation
from planaria.data.skips import Windows
from planaria.layout import Layout
from planaria.planner.plan import Plan

Row = dict[str, Any]


@dataclass
class Past:
    """What happened before."""

    began: float
    """When the run began, as ``time.time()``."""
    sizes: dict[str, int]
    """Bytes of the other records by then."""
    members: dict[str, str] = field(default_factory=dict)
    """Node of every process that was started, the lost ones included, by name, oldest first."""
    promoted: set[str] = field(default_factory=set)
    """Standbys that have become workers."""
    lost: set[str] = field(default_factory=set)
    quarantined: dict[str, tuple[float, int, str]] = field(default_factory=dict)
    """(end, as ``time.time()``; how many it was; reason) of the newest quarantine of a node."""
    generations: list[Generation] = field(default_factory=list)
    history: list[policy.Generation] = field(default_factory=list)
    """The generations that are over, as the policies see them."""

    @property
    def unfinished(self) -> Generation | None:
        """The generation that was running, or being formed."""
        return self.generations[-1] if len(self.generations) > len(self.history) else None


def read(rows: Iterable[Mapping[str, Any]], run_id: str) -> Past | None:
    """The past of the run; None if this run has none: the rows may be those of earlier runs in the same folder."""
    past: Past | None = None
    for row in rows:
        if row["t"] == "run":
            past = (past or Past(row["time"], row["sizes"])) if row["run"] == run_id else None
        elif past is not None:
            _take(past, row)
    return past


def _take(past: Past, row: Mapping[str, Any]) -> None:
    match row["t"]:
        case "member":
            past.members[row["ident"]] = row["node"]
        case "promoted":
            past.promoted.add(row["ident"])
        case "lost":
            past.lost.add(row["ident"])
        case "quarantined":
            past.quarantined[row["node"]] = (row["until"], row["times"], row["reason"])
        case "generation":
            past.generations.append(_generation(row))
        case "first_step":
            _first_step(past.generations[-1], row)
        case "ended":
            past.generations[-1].step = row["step"]
            past.history.append(_judged(row))


def run_row(run_id: str, now: float, sizes: Mapping[str, int]) -> Row:
    """A run begins, or its controller has returned."""
    return {"t": "run", "run": run_id, "time": now, "sizes": dict(sizes)}


def member_row(ident: str, node: str) -> Row:
    """A process is being started."""
    return {"t": "member", "ident": ident, "node": node}


def promoted_row(ident: str) -> Row:
    """A standby becomes a worker."""
    return {"t": "promoted", "ident": ident}


def skips_row(windows: Windows) -> Row:
    """Training leaves these batches out from now on, in later submissions too."""
    return {"t": "skips", "windows": windows}


def skips(rows: Iterable[Mapping[str, Any]]) -> Windows:
    """What training leaves out, by the newest row of whatever submission."""
    newest = [row["windows"] for row in rows if row["t"] == "skips"][-1:]
    return tuple((first, last) for windows in newest for first, last in windows)


def lost_row(ident: str) -> Row:
    """A process is gone."""
    return {"t": "lost", "ident": ident}


def quarantined_row(node: str, until: float, times: int, reason: str) -> Row:
    """A node gets no work until then (``time.time()``)."""
    return {"t": "quarantined", "node": node, "until": until, "times": times, "reason": reason}


def generation_row(generation: Generation) -> Row:
    """A generation is about to be ordered."""
    plan = generation.plan
    return {
        "t": "generation",
        "number": generation.number,
        "layout": asdict(plan.layout),
        "ranks": plan.ranks,
        "spares": plan.spares,
        "reason": plan.reason,
        "cause": generation.cause,
        "planned": generation.planned,
        "step": generation.start_step,
        "nodes": generation.nodes,
        "token": generation.token,
    }


def first_step_row(generation: Generation) -> Row:
    """A generation has completed its first step."""
    return {"t": "first_step", "recovery_s": generation.recovery_s, "phases": generation.phases}


def ended_row(judged: policy.Generation, step: int) -> Row:
    """A generation is over, after ``step`` steps."""
    return {"t": "ended", "step": step, **asdict(judged)}


def _generation(row: Mapping[str, Any]) -> Generation:
    plan = Plan(Layout(**row["layout"]), tuple(row["ranks"]), tuple(row["spares"]), row["reason"])
    generation = Generation(row["number"], plan, row["cause"], row["planned"], row["step"], step=row["step"])
    generation.nodes, generation.token = tuple(row["nodes"]), row["token"]
    return generation


def _first_step(generation: Generation, row: Mapping[str, Any]) -> None:
    # Of the clock of the life before only differences mean anything.
    generation.first_step_at, generation.phases = 0.0, dict(row["phases"])
    generation.change_at = None if row["recovery_s"] is None else -row["recovery_s"]


def _judged(row: Mapping[str, Any]) -> policy.Generation:
    failure = row["failure"]
    if failure is not None:
        error = failure["user_error"]
        failure = policy.Failure(failure["cause"], failure["step"], policy.UserError(**error) if error else None)
    return policy.Generation(row["number"], row["last_step"], failure)
