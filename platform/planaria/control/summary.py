"""What is told of a job: while it runs, and when it is over."""

from __future__ import annotations

import time
from typing import Any

from planaria.control.desk import Desk
from planaria.control.members import Life
from planaria.control.status import generation_row


def status(desk: Desk, now: float) -> dict[str, Any]:
    """What the live view shows; plain values."""
    view = desk.view
    view.goodput = desk.chronicle.account.view(now)
    view.state, view.last_event = desk.state.value, desk.record.last_event
    view.workers = len(desk.generations[-1].members) if desk.generations else 0
    view.ready = sum(1 for _ in desk.staff.workers.of(Life.READY))
    view.nodes = desk.staff.ground.trust.listing(now)
    return view.as_dict()


def look(desk: Desk, began: float, now: float) -> dict[str, Any]:
    """What somebody sees who looks on from elsewhere: the status, every process, the newest losses and events.

    Args:
        desk: the controller's.
        began: when the job began, as ``time.time()``.
        now: ``time.monotonic()``.
    """
    ranks = {ident: rank for rank, ident in enumerate(desk.generations[-1].members)} if desk.generations else {}
    processes = [
        {
            "kind": members.kind,
            "ident": member.ident,
            "node": member.node,
            "life": member.life.value,
            "since_s": max(0.0, now - member.since),
            "rank": ranks.get(member.ident),
        }
        for members in desk.staff.kinds
        if members.kind != "seat"
        for member in members.of(*Life)
    ]
    return {
        "name": desk.job.name,
        "run_dir": desk.run_dir,
        "began": began,
        "status": status(desk, now),
        "losses": desk.view.losses,
        "events": list(desk.record.recent),
        "processes": processes,
    }


def summary(desk: Desk, began: float, evaluation: Any, failure: Exception | None) -> dict[str, Any]:
    """What became of the job.

    Args:
        desk: the controller's.
        began: when the job began, as ``time.time()``.
        evaluation: scores at the end, if there are any.
        failure: what ended it, if something did.
    """
    step, path = desk.custody.durable()
    return {
        "name": desk.job.name,
        "state": desk.state.value,
        "error": None if failure is None else str(failure),
        "trace": getattr(failure, "trace", None),
        "stopped_by": desk.stop,
        "steps": desk.generations[-1].step if desk.generations else 0,
        "loss": desk.view.loss,
        "seconds": time.time() - began,
        "generations": [generation_row(item) for item in desk.generations],
        "evaluation": evaluation,
        "goodput": desk.chronicle.account.view(time.monotonic()),
        "checkpoint_step": step,
        "checkpoint_path": path,
        "bad_samples": desk.chronicle.bad_samples,
        "nodes": desk.staff.ground.trust.listing(time.monotonic()),
        "metrics": desk.view.last,
        "run_dir": desk.run_dir,
    }
