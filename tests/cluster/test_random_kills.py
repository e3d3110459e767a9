"""Nodes die at random moments, one after another; memory loses no step that had a living copy of each slice.

``PLANARIA_KILLS=30 pytest tests/cluster/test_random_kills.py`` (``make soak``) is the long form.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.forms import long_form
from tests.support.runs import Run, expected_ids, job, node_of_worker

from planaria.runtime.local_cluster import LocalCluster
from planaria.trainer import ElasticTrainer

KILLS = int(os.environ.get("PLANARIA_KILLS", "1"))
SEED = int(os.environ.get("PLANARIA_SEED", "1"))
NODES = 3


class Reaper:
    """Whenever all nodes work, waits a random while, kills the node of a random worker, and brings another node."""

    def __init__(self, cluster: LocalCluster, folder: Path, kills: int, seed: int) -> None:
        self._cluster, self._folder, self._kills, self._random = cluster, folder, kills, random.Random(seed)
        self.moments: list[float] = []

    def watch(self, status: dict[str, Any]) -> None:
        """Called with the status of the job a few times per second."""
        if status["state"] != "running" or status["workers"] != NODES or len(self.moments) == self._kills:
            return
        time.sleep(self._random.uniform(0.0, 1.0))
        run = Run(self._folder)
        victim = self._random.choice(run.of("generation")[-1]["workers"])
        self.moments.append(time.time())
        self._cluster.kill_node(node_of_worker(self._cluster, run, victim))
        self._cluster.add_node()


@pytest.mark.timeout(240 + 120 * KILLS)
@long_form  # nodes are killed in tests/chaos, too, which has a short form
def test_nodes_killed_at_random_moments_cost_no_step_that_memory_still_had(tmp_path: Path) -> None:
    steps = 200 + 150 * KILLS
    config = job(
        tmp_path,
        train={"steps": steps, "global_batch": 6, "micro_batch": 2},
        elastic={"min_workers": 1, "max_workers": NODES, "max_failures": -1},
        checkpoint={"every": 10_000},  # whatever comes back comes from memory
    )
    with LocalCluster(NODES) as cluster:
        reaper = Reaper(cluster, tmp_path, KILLS, SEED)
        ElasticTrainer(config, watch=reaper.watch).fit()
    assert len(reaper.moments) == KILLS, "the job ended before the last kill: give it more steps"
    run = Run(tmp_path)
    lost = [check_recovery(run, moment) for moment in reaper.moments]
    print(f"kills: {KILLS}, completed steps redone: {lost}")
    assert run.ids() == expected_ids(config, 500)
    assert not run.of("memory_damaged")


def check_recovery(run: Run, killed_at: float) -> int:
    """How many reported steps were redone after a kill; fails if memory had them complete."""
    after = next(event for event in run.of("generation") if event["time"] > killed_at)
    before = [row for row in run.metrics if row["gen"] < after["gen"]]
    assert after["source"] == "memory"
    complete = max(row["complete"] for row in before if row["complete"] is not None)
    assert after["step"] >= complete, "a step with two living copies was lost"
    done = max(row["step"] for row in before) + 1
    # A step may be reported before its copies have arrived; then its only copies died with the node.
    assert done - after["step"] <= 1
    return done - after["step"]
