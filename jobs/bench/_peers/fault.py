"""The fault: waits for the moment, and notes when it struck."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import psutil

from _peers.work import Work
from planaria.observe.record import read_lines

if TYPE_CHECKING:
    from _peers.cluster import BenchCluster

POLL_S = 0.01


def await_step(work: Work, completed: Callable[[], int]) -> None:
    """Return once ``work.kill_after`` steps are completed."""
    while completed() < work.kill_after:
        time.sleep(POLL_S)


def strike(work: Work, victims: list[psutil.Process], rank: dict[str, Any]) -> None:
    """Kill all processes of a node at once, and write ``fault.json`` with the time just before it."""
    began = time.time()
    kill(victims)
    tree = {"time": began, "took_s": time.time() - began, "processes": len(victims), "victim": rank}
    (work.path / "fault.json").write_text(json.dumps(tree), encoding="utf-8")


def kill(victims: list[psutil.Process]) -> None:
    """SIGKILL; frozen first, so that none of them notices that another is gone."""
    for sign in (signal.SIGSTOP, signal.SIGKILL):
        for process in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(sign)


def strike_node(work: Work, cluster: BenchCluster, rank: dict[str, Any]) -> None:
    """The same for the local Ray node that runs this rank."""
    node = cluster.node_with(rank["pid"])
    strike(work, cluster.processes_of(node), rank)
    cluster.kill_node(node)  # nothing is left of it to kill: this takes it off the books


def steps_completed(work: Work) -> int:
    """Highest step in a peer's log."""
    return max((row["step"] for row in read_lines(work.path / "steps.jsonl")), default=0)


def last_rank(work: Work) -> dict[str, Any]:
    """The highest rank of the newest group: the one whose node dies. Never rank 0, for all contenders alike."""
    rows = read_lines(work.path / "ranks.jsonl")
    world = rows[-1]["world"]
    return next(row for row in reversed(rows) if row["rank"] == world - 1 and row["world"] == world)
