"""The faults: wait for the moment, strike, and note when."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
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


def endure(work: Work, cluster: BenchCluster, fit: Callable[[], object], completed: Callable[[], int]) -> None:
    """Train, lose and return nodes as ``work.outages`` say, and write ``faults.jsonl``; its last row is the end.

    The node that has lived longest is lost, so that all contenders lose the same ones, whatever they do there. The
    training is left running.

    Raises:
        RuntimeError: it ended before its time.
    """
    # Nodes can be started by the main thread only, for Ray sets a signal handler then.
    training = threading.Thread(target=fit, daemon=True)
    training.start()

    def sleep_until(due: Callable[[], bool]) -> None:
        while not due():
            if not training.is_alive():
                raise RuntimeError("the job ended before its time")
            time.sleep(POLL_S)

    sleep_until(lambda: completed() >= 1)
    began = time.monotonic()
    story = [(at, kind) for outage in work.outages for at, kind in zip(outage, ("lost", "returned"), strict=True)]
    for at, kind in sorted([*((at, kind) for at, kind in story if at < work.lasts_s), (work.lasts_s, "end")]):
        sleep_until(lambda due=began + at: time.monotonic() >= due)
        note(work, {"time": time.time(), "kind": kind, "due": at})
        if kind == "lost":
            cluster.kill_node(cluster.nodes[0])
        elif kind == "returned":
            cluster.add_node()


def note(work: Work, row: dict[str, Any]) -> None:
    """Append to ``faults.jsonl``."""
    with (work.path / "faults.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def over(work: Work) -> bool:
    """Whether :func:`endure` has come to its end."""
    return any(row["kind"] == "end" for row in read_lines(work.path / "faults.jsonl"))


def steps_completed(work: Work) -> int:
    """Highest step in a peer's log."""
    return max((row["step"] for row in read_lines(work.path / "steps.jsonl")), default=0)


def last_rank(work: Work) -> dict[str, Any]:
    """The highest rank of the newest group: the one whose node dies. Never rank 0, for all contenders alike."""
    rows = read_lines(work.path / "ranks.jsonl")
    world = rows[-1]["world"]
    return next(row for row in reversed(rows) if row["rank"] == world - 1 and row["world"] == world)
