"""``planaria demo``: four local nodes train a small model, one is killed, three go on, a new one joins."""

from __future__ import annotations

import contextlib
import importlib.resources
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from planaria.commands.failures import FAILED, INTERRUPTED, TERMINATED, complain
from planaria.commands.train import stop_code
from planaria.config import JobConfig, load
from planaria.paths import absolute_paths

if TYPE_CHECKING:
    from rich.console import Console

    from planaria.runtime.local_cluster import LocalCluster

NODES = 4
KILL_AT = 0.5
"""Share of the steps after which a node is killed."""
JOIN_AT = 0.65
"""Share of the steps after which a node is added."""
TIMES_CHANCE = 3.0
"""How far above chance the answers must be."""


class Script:
    """What happens to the cluster, and when: called with every status, after the view."""

    def __init__(
        self, cluster: LocalCluster, steps: int, view: Callable[[Mapping[str, Any]], None], tell: Callable[[str], None]
    ) -> None:
        self._cluster, self._view, self._tell = cluster, view, tell
        self._kill_at, self._join_at = int(steps * KILL_AT), int(steps * JOIN_AT)
        self.killed = self.joined = False

    def __call__(self, status: Mapping[str, Any]) -> None:
        self._view(status)
        if status.get("final"):
            return
        if not self.killed and status["step"] >= self._kill_at and status["workers"] == NODES:
            self.killed = True
            node = victim(self._cluster)
            self._tell(f"step {status['step']}: killing node {node.node_id[:8]}, every process of it, with SIGKILL")
            self._cluster.kill_node(node)
        elif self.killed and not self.joined and status["step"] >= self._join_at and status["generation"] > 1:
            self.joined = True
            self._tell(f"step {status['step']}: starting a new node")
            self._cluster.add_node()


def victim(cluster: LocalCluster) -> Any:
    """A node that carries a worker; one without a loader if there is such a node."""

    def titles(node: Any) -> str:
        found = []
        for process in cluster.processes_of(node):
            with contextlib.suppress(Exception):
                found.append(" ".join(process.cmdline()))
        return "\n".join(found)

    running = {id(node): titles(node) for node in cluster.nodes}
    workers = [node for node in cluster.nodes if "ray::Worker" in running[id(node)]]
    lone = [node for node in workers if "ray::Loader" not in running[id(node)]]
    return (lone or workers or cluster.nodes)[-1]


def run_demo(keep: str | None = None, steps: int | None = None) -> int:
    """Run the demo; 0 if the job survived and its answers are well above chance.

    Args:
        keep: folder for the run directory; None: a temporary one, removed at the end.
        steps: other number of optimizer steps.
    """
    from rich.console import Console

    console = Console(highlight=False)
    with deferred_signals() as caught:
        storage = tempfile.mkdtemp(prefix="planaria-demo-") if keep is None else keep
        try:
            return _run(demo_job(storage, steps), console, caught, kept=keep is not None)
        finally:
            if keep is None:
                shutil.rmtree(storage, ignore_errors=True)


def demo_job(storage: str, steps: int | None) -> JobConfig:
    """The embedded job description, for this folder."""
    overrides = [f"train.steps={steps}"] if steps is not None else []
    source = importlib.resources.files("planaria") / "demo.yaml"
    with importlib.resources.as_file(source) as path:
        job = load(path, overrides)
    return absolute_paths(job.model_copy(update={"storage": storage}))


def _run(job: JobConfig, console: Console, caught: list[int], kept: bool) -> int:
    from planaria.observe.view import LiveView, print_summary, write_line

    if kept and (Path(job.storage) / job.name / "events.jsonl").exists():
        from planaria.commands.failures import UsageError

        raise UsageError(f"{job.storage}/{job.name}: holds a run already; give --keep another folder")
    view = LiveView(job.name, console)
    write_line(console, f"Starting {NODES} Ray nodes on this machine")
    # A dead node is what is to be shown here; Ray's own report of it would tear the panel. Read at import.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "has been marked dead")
    from planaria.runtime.local_cluster import LocalCluster
    from planaria.trainer import ElasticTrainer, TrainingFailed, TrainingStopped

    trouble: Exception | None = None
    with LocalCluster(NODES) as cluster:
        if caught:
            return _stopped(caught)
        script = Script(cluster, job.train.steps, view, lambda line: write_line(console, line))
        trainer = ElasticTrainer(job, watch=script)
        with view:
            try:
                trainer.fit()
            except (TrainingFailed, TrainingStopped) as error:
                trouble = error
    if trainer.summary:
        print_summary(console, job.name, trainer.summary)
    if trouble is not None:
        if isinstance(trouble, TrainingStopped):
            complain(str(trouble).partition(";")[0])  # what goes on from the checkpoint would not be the demo
            return stop_code(trouble.by)
        complain(str(trouble))
        return FAILED
    console.print()
    short = shortfalls(trainer.summary)
    for line in short:
        write_line(console, f"FELL SHORT: {line}")
    if short:
        return FAILED
    write_line(console, praise(trainer.summary))
    if not kept:
        write_line(console, "The run directory was temporary and is removed; keep it with --keep PATH.")
    return 0


def shortfalls(summary: Mapping[str, Any]) -> list[str]:
    """What the run did not show that it should have."""
    found = []
    rows = summary["generations"]
    if summary["state"] != "finished":
        found.append(f"the job ended as {summary['state']}")
    sizes = [row["workers"] for row in rows]
    if NODES - 1 not in sizes:
        found.append(f"no generation ran on {NODES - 1} workers (they had {sizes})")
    elif sizes[-1] != NODES:
        found.append(f"the job ended on {sizes[-1]} workers, not on {NODES}: the new node came too late")
    score = summary["evaluation"]
    if not score or not score["questions"]:
        found.append("the held-out questions were not scored")
    elif score["accuracy"] < TIMES_CHANCE * score["chance"]:
        found.append(
            f"held-out accuracy {score['accuracy']:.3f} is only {score['accuracy'] / score['chance']:.2f} times chance "
            f"({score['chance']:.3f}); at least {TIMES_CHANCE:g} times was expected"
        )
    return found


def praise(summary: Mapping[str, Any]) -> str:
    """The outcome of a run that showed everything."""
    score = summary["evaluation"]
    faults = [row["recovery_s"] for row in summary["generations"] if row["cause"] not in ("start", "resize")]
    times = ", ".join(f"{seconds:.1f} s" for seconds in faults if seconds is not None)
    return (
        f"One node died, and training went on after {times}.\n"
        f"Held-out answers: {score['accuracy']:.3f} right, chance {score['chance']:.3f}: "
        f"{score['accuracy'] / score['chance']:.1f} times chance."
    )


def _stopped(caught: list[int]) -> int:
    complain("stopped before training began")
    return TERMINATED if caught[0] == signal.SIGTERM else INTERRUPTED


@contextlib.contextmanager
def deferred_signals() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM are noted instead of ending a start or an end of nodes half-way; the third one ends it.

    While a job runs, its trainer handles them.
    """
    caught: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        if len(caught) > 2:
            raise KeyboardInterrupt
        complain("ending; please wait")

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
