"""Planaria itself: ``ElasticTrainer`` on the local cluster."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from _peers import fault
from _peers.work import Work
from planaria.observe.record import read_lines

NAME = "bench"


def settings(stock: bool) -> dict[str, Any]:
    """What is set, for the report."""
    return {"num_workers": "(1, N)", "max_failures": 20, "data": "loader actors", "rest": "all defaults"}


def run_dir(work: Work) -> Path:
    """Where the run leaves its records."""
    return work.path / NAME


def completed(work: Work) -> int:
    """Highest completed step; rows count from 0."""
    return max((row["step"] + 1 for row in read_lines(run_dir(work) / "metrics.jsonl")), default=0)


def run(work: Work) -> None:
    """Start the cluster, train, kill the node of the last rank, and see the job through."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    from _peers.cluster import local_cluster
    from planaria.trainer import ElasticTrainer

    workers: Any = (1, work.workers or work.nodes)  # Ray documents the range, its annotation does not
    with local_cluster(work.nodes) as cluster:
        trainer = ElasticTrainer(
            work.job(NAME),
            ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
            RunConfig(name=NAME, storage_path=work.folder, failure_config=FailureConfig(max_failures=20)),
        )

        if work.outages:
            return fault.endure(work, cluster, trainer.fit, lambda: completed(work))

        def inject() -> None:
            fault.await_step(work, lambda: completed(work))
            events = read_lines(run_dir(work) / "events.jsonl")
            ranks = next(event["workers"] for event in reversed(events) if event["event"] == "generation")
            pid = next(e["pid"] for e in events if e["event"] == "joined" and e["member"] == ranks[-1])
            fault.strike_node(work, cluster, {"rank": len(ranks) - 1, "world": len(ranks), "pid": pid})

        if work.kill_after:
            threading.Thread(target=inject, daemon=True).start()
        trainer.fit()
