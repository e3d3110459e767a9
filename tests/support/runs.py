"""Small jobs for cluster tests, and what their run directories say."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planaria.config import JobConfig, parse
from planaria.data.order import indices
from planaria.observe.record import read_lines
from planaria.runtime.local_cluster import LocalCluster
from planaria.trainer import ElasticTrainer, TrainingStopped

TINY = {
    "model_type": "llava",
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
    },
    "text_config": {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
}


def job(storage: Path, **sections: Any) -> JobConfig:
    """A job of a second or so per ten steps; sections are merged over the defaults."""
    tree: dict[str, Any] = {
        "name": "run",
        "storage": str(storage),
        "model": {"config": TINY},
        "data": {"max_length": 96, "scenes": {"train_samples": 500, "val_samples": 32}},
        "train": {"steps": 30, "global_batch": 12, "micro_batch": 4},
        "elastic": {"min_workers": 1, "max_workers": 3},
        "checkpoint": {"every": 5},
        "evaluate": {"samples": 0},
    }
    for key, value in sections.items():
        tree[key] = tree.get(key, {}) | value if isinstance(value, dict) else value
    return parse(tree)


class Run:
    """A finished run's records."""

    def __init__(self, storage: Path, name: str = "run") -> None:
        self.path = storage / name
        self.events = read_lines(self.path / "events.jsonl")
        self.metrics = read_lines(self.path / "metrics.jsonl")
        self.ledger = read_lines(self.path / "ledger.jsonl")

    def losses(self) -> dict[int, float]:
        """Loss by step; the last execution of a step counts."""
        return {row["step"]: row["loss"] for row in self.metrics}

    def ids(self) -> dict[int, list[int]]:
        """Consumed ids by step; the last execution of a step counts."""
        return {row["step"]: sorted(row["ids"]) for row in self.ledger}

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Events of one kind."""
        return [event for event in self.events if event["event"] == kind]

    def trains_in(self, generation: int, steps: int = 5) -> bool:
        """Whether so many steps were done in this generation or a later one."""
        return sum(row["gen"] >= generation for row in self.metrics) >= steps

    def pids(self, member: str) -> int:
        """Process id of a member, as it said when it joined."""
        return next(int(event["pid"]) for event in self.of("joined") if event["member"] == member)


def expected_ids(config: JobConfig, samples: int, steps: int | None = None) -> dict[int, list[int]]:
    """What every step (of ``steps``; default: all) must consume, each id once: the order is a function of seed and step
    alone."""
    size = config.train.global_batch
    return {
        step: sorted(indices(step * size, (step + 1) * size, samples, config.seed, config.data.shuffle))
        for step in range(config.train.steps if steps is None else steps)
    }


ENDLESS = 100_000
"""Steps of a job that runs until the test has seen enough: processes start as fast as the machine lets them."""


def train_with(
    config: JobConfig, actions: dict[int, Callable[[], None]], until: Callable[[Run], bool] | None = None, **kwargs: Any
) -> ElasticTrainer:
    """Train, calling each action once when its step has been completed.

    Args:
        config: the job.
        actions: by step.
        until: ends the job, as Ctrl-C would, once it holds and all actions were called; without it all steps are done.
        **kwargs: for the trainer.
    """
    left, asked = dict(actions), False

    def watch(status: dict[str, Any]) -> None:
        nonlocal asked
        for step in [step for step in left if status["step"] >= step and status["state"] == "running"]:
            left.pop(step)()
        if until is not None and not (asked or left) and until(Run(Path(config.storage), config.name)):
            asked = True
            raise KeyboardInterrupt

    trainer = ElasticTrainer(config, watch=watch, **kwargs)
    if until is None:
        trainer.fit()
    else:
        with pytest.raises(TrainingStopped):
            trainer.fit()
    assert not left, f"the job ended before steps {sorted(left)}"
    return trainer


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Poll until ``condition`` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.1)


def node_of_worker(cluster: LocalCluster, run: Run, member: str) -> Any:
    """The cluster node on which a worker lives."""
    node_id = next(event["node"] for event in run.of("joined") if event["member"] == member)
    return cluster.node_of(node_id)
