"""Steady-state step time of the demo's job, with snapshots or without: ``python -m _checkpoint.steps FOLDER``."""

from __future__ import annotations

import importlib.resources
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from _checkpoint.pool import Absent

WORKERS, STEPS, WARM_UP = 4, 60, 20
EVERY = {"steps without snapshots": 0, "steps with snapshots": 1}


def measure(folder: Path, environment: Mapping[str, str], names: list[str], limit_s: float) -> dict[str, float]:
    """Median seconds per step of each of ``names``, which train one after the other on one local cluster.

    Raises:
        Absent: a job failed, or the time was up.
    """
    folder.mkdir(parents=True)
    with (folder / "log.txt").open("wb") as log:
        try:
            code = subprocess.run(
                [sys.executable, "-m", "_checkpoint.steps", str(folder), *names],
                env={**environment},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=limit_s,
            ).returncode
        except subprocess.TimeoutExpired:
            raise Absent(f"the demo's job was not done within {limit_s:.0f} s") from None
    if code:
        raise Absent(f"the demo's job ended with exit code {code}")
    found: dict[str, float] = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    return found


def run(folder: Path, names: list[str]) -> dict[str, float]:
    """Train; see :func:`measure`."""
    from planaria.config import load
    from planaria.observe.record import read_lines
    from planaria.runtime.local_cluster import LocalCluster
    from planaria.trainer import ElasticTrainer

    found: dict[str, float] = {}
    source = importlib.resources.files("planaria") / "demo.yaml"
    with LocalCluster(WORKERS), importlib.resources.as_file(source) as path:
        for name in names:
            run_name = name.replace(" ", "-")
            overrides = [
                f"name={run_name}",
                f"storage={folder}",
                f"memory.every={EVERY[name]}",
                f"train.steps={STEPS}",
                f"elastic.min_workers={WORKERS}",
                "evaluate.samples=0",
                "checkpoint.every=1000",
                "checkpoint.at_end=false",
            ]
            ElasticTrainer(load(path, overrides)).fit()
            # From one step's end to the next one's: whatever a snapshot makes training wait for is in it.
            times = [row["time"] for row in read_lines(folder / run_name / "metrics.jsonl")][WARM_UP:]
            found[name] = statistics.median(later - earlier for earlier, later in itertools.pairwise(times))
    return found


if __name__ == "__main__":
    target = Path(sys.argv[1])
    draft = target / "found.part"
    draft.write_text(json.dumps(run(target, sys.argv[2:])), encoding="utf-8")
    os.replace(draft, target / "found.json")
