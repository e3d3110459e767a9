"""Nodes die at random moments, one after another; memory loses no step that had a living copy of each slice.

``PLANARIA_KILLS=30 pytest tests/cluster/test_random_kills.py`` (``make soak``) is the long form.
"""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.runs import Run, expected_ids, job, node_of_worker

from planaria.runtime.local_cluster import LocalCluster
from planaria.trainer import ElasticTrainer

KILLS = int(os.environ.get("PLANARIA_KILLS", "3"))
SEED = int(os.environ.get("PLANARIA_SEED", "1"))
NODES = 3


class Reaper(threading.Thread):
    """Kills a random worker's node at a random moment, brings another node, waits until it works, and again.

    Once ``kills`` nodes are dead it asks the trainer to end by its step count, through ``done``.
    """

    def __init__(self, cluster: LocalCluster, folder: Path, kills: int, seed: int) -> None:
        super().__init__(daemon=True)
        self._cluster, self._folder, self._kills, self._random = cluster, folder, kills, random.Random(seed)
        self.moments: list[float] = []
        self.failure: BaseException | None = None
        self.status: dict[str, Any] = {}

    def run(self) -> None:
        try:
            for _ in range(self._kills):
                self._await_full_size()
                time.sleep(self._random.uniform(0.0, 1.0))
                run = Run(self._folder)
                victim = self._random.choice(run.of("generation")[-1]["workers"])
                self.moments.append(time.time())
                self._cluster.kill_node(node_of_worker(self._cluster, run, victim))
                self._cluster.add_node()
        except BaseException as error:
            self.failure = error

    def _await_full_size(self) -> None:
        deadline = time.monotonic() + 120
        while not (self.status.get("state") == "running" and self.status.get("workers") == NODES):
            assert time.monotonic() < deadline, f"never {NODES} workers again: {self.status.get('last_event')}"
            time.sleep(0.02)


@pytest.mark.timeout(120 + 60 * KILLS)
def test_nodes_killed_at_random_moments_cost_no_step_that_memory_still_had(tmp_path: Path) -> None:
    steps = 150 + 150 * KILLS
    config = job(
        tmp_path,
        train={"steps": steps, "global_batch": 6, "micro_batch": 2},
        elastic={"min_workers": 1, "max_workers": NODES, "max_failures": -1},
        checkpoint={"every": 10_000},  # whatever comes back comes from memory
    )
    with LocalCluster(NODES) as cluster:
        reaper = Reaper(cluster, tmp_path, KILLS, SEED)
        trainer = ElasticTrainer(config, watch=reaper.status.update)
        reaper.start()
        trainer.fit()
        reaper.join(10)
    assert reaper.failure is None, reaper.failure
    assert len(reaper.moments) == KILLS, "the job ended before the last kill: give it more steps"
    run = Run(tmp_path)
    lost = [check_recovery(run, moment) for moment in reaper.moments]
    print(f"kills: {KILLS}, completed steps redone: {lost}")
    assert run.ids() == expected_ids(config, 500)
    assert not run.of("memory_damaged")


def check_recovery(run: Run, killed_at: float) -> int:
    """How many reported steps were redone after a kill; fails if memory had them complete."""
    after = [event for event in run.of("generation") if event["time"] > killed_at][0]
    before = [row for row in run.metrics if row["gen"] < after["gen"]]
    assert after["source"] == "memory"
    complete = max(row["complete"] for row in before if row["complete"] is not None)
    assert after["step"] >= complete, "a step with two living copies was lost"
    done = max(row["step"] for row in before) + 1
    # A step may be reported before its copies have arrived; then its only copies died with the node.
    assert done - after["step"] <= 1
    return done - after["step"]
