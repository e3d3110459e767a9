"""What every contender trains, and where its processes leave their traces for the bench."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from planaria.config import JobConfig, parse


@dataclass(frozen=True)
class Work:
    """One training job and its fault; the same for all contenders."""

    folder: str
    """Scratch folder of one run: logs, checkpoints."""
    nodes: int = 3
    workers: int = 0
    """How many of the nodes carry a worker; 0: all."""
    preset: str = "llava-tiny"
    global_batch: int = 24
    micro_batch: int = 8
    steps: int = 35
    checkpoint_every: int = 10
    kill_after: int = 25
    """The node dies once this many steps are completed: half a checkpoint interval past the last checkpoint.
    0: no fault."""
    outages: tuple[tuple[float, float], ...] = ()
    """Instead of the one fault: when a node is lost, and when one returns, in seconds from the first completed step."""
    lasts_s: float = 0.0
    """With ``outages``: when the measurement ends."""
    seed: int = 0
    stock: bool = False
    """Whether a peer runs with its defaults instead of its best settings."""

    def job(self, name: str) -> JobConfig:
        """The job description; peers read model, data, batch and optimizer from it."""
        return parse(
            {
                "name": name,
                "seed": self.seed,
                "model": {"preset": self.preset},
                "data": {"source": "scenes"},
                "optim": {"name": "adamw", "lr": 1e-3, "schedule": {"kind": "constant"}},
                "train": {
                    "steps": self.steps,
                    "global_batch": self.global_batch,
                    "micro_batch": self.micro_batch,
                    "precision": "fp32",
                },
                "elastic": {"min_workers": 1, "max_workers": self.workers or self.nodes},
                "checkpoint": {"every": self.checkpoint_every},
                "evaluate": {"samples": 0, "at_end": False},
                "storage": self.folder,
            }
        )

    @property
    def path(self) -> Path:
        """The scratch folder."""
        return Path(self.folder)

    def as_json(self) -> str:
        """For the command line of a contender's process."""
        return json.dumps(asdict(self))


class Trace:
    """JSON lines that a rank of a peer leaves: ``ranks.jsonl`` when it starts, ``steps.jsonl`` per step of rank 0."""

    def __init__(self, work: Work, rank: int, world: int) -> None:
        self._path, self._rank, self._world = work.path, rank, world
        self.incarnation = f"{os.getpid()}-{time.time():.3f}"
        self._append("ranks", {"rank": rank, "world": world, "pid": os.getpid(), "inc": self.incarnation})

    def step(self, step: int, loss: float) -> None:
        """Step number ``step`` (1-based) is completed: its parameters are updated."""
        if self._rank == 0:
            self._append("steps", {"step": step, "loss": loss, "inc": self.incarnation, "world": self._world})

    def _append(self, name: str, row: dict[str, Any]) -> None:
        line = json.dumps({"time": time.time(), **row}) + "\n"
        with (self._path / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(line)
