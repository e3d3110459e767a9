"""A run that changes its layout again and again, through durable checkpoints alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tests.support.ranks import RankPool
from tests.support.saving import save

from planaria.config import JobConfig
from planaria.layout import Layout
from planaria.models.vlm import VLMRecipe
from planaria.parity.steps import engine_of, step
from planaria.runtime.groups import Groups
from planaria.state.checkpoint import Checkpoint
from planaria.state.vault import Vault


@dataclass(frozen=True)
class Station:
    """A layout to stop at, and what the job says differently there.

    Attributes:
        layout: the layout.
        overrides: keys of the job (dotted) that hold there alone, such as the schedule of a pipeline.
    """

    layout: Layout
    overrides: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return " ".join([str(self.layout), *(f"{key}={value}" for key, value in self.overrides.items())])


def layouts(most_ranks: int, batch: int) -> list[Layout]:
    """Every layout on which the native engine trains a preset model (4 heads, 2 for keys and values, 3 layers): of at
    most ``most_ranks`` ranks, and none without a sample."""
    sizes = range(1, most_ranks + 1)
    return [
        Layout(pp, replicate, shard, cp, tp)
        for pp in (1, 2, 3)
        for replicate in sizes
        for shard in sizes
        for cp in (1, 2, 4)
        for tp in (1, 2)
        if pp * replicate * shard * cp * tp <= most_ranks and replicate * shard <= batch and cp * tp <= 4
    ]


def route(seed: int, stops: Sequence[Station], count: int) -> list[Station]:
    """``count`` stations drawn at random, no two in a row alike."""
    rng = random.Random(seed)
    drawn = [rng.choice(stops)]
    while len(drawn) < count:
        drawn.append(rng.choice([stop for stop in stops if stop != drawn[-1]]))
    return drawn


def hop(pool: RankPool, job: JobConfig, stations: Sequence[Station], folder: Path, steps: int) -> list[float]:
    """Train ``steps`` steps at each station, from the checkpoint that the one before has left; the losses.

    Raises:
        AssertionError: a rank holds other bits than the checkpoint that it has loaded, or has written.
    """
    losses: list[float] = []
    for station in stations:
        answers = pool.run(station.layout, _stay, with_keys(job, station.overrides), str(folder), len(losses), steps)
        assert all(own == answers[0] for own in answers), station
        losses += answers[0]
    return losses


def with_keys(job: JobConfig, overrides: dict[str, Any]) -> JobConfig:
    """``job`` with other values of some (dotted) keys."""
    tree = job.model_dump()
    for dotted, value in overrides.items():
        *path, leaf = dotted.split(".")
        node = tree
        for part in path:
            node = node[part]
        node[leaf] = value
    return JobConfig.model_validate(tree)


def _stay(groups: Groups, job: JobConfig, folder: str, begin: int, steps: int) -> list[float]:
    engine = engine_of(groups, VLMRecipe(job), job)
    vault = Vault(folder)
    if begin:
        with vault.at(begin) as checkpoint:
            engine.load(checkpoint)
            _compare(engine, checkpoint)
    assert engine.step_done == begin
    losses = [step(engine).loss for _ in range(steps)]
    save(engine, vault, f"from-{begin}")
    with vault.at(begin + steps) as checkpoint:
        _compare(engine, checkpoint)
    return losses


def _compare(engine: Any, checkpoint: Checkpoint) -> None:
    """Whether every box that this rank holds is, bit for bit, that of the checkpoint, and nothing else is stored."""
    assert engine.expected() == {name: checkpoint.global_shape(name) for name in checkpoint.tensors}
    for held in engine.state():
        stored = checkpoint.read(held.tensor, held.box)
        assert stored.dtype == held.value.dtype, held.tensor
        assert torch.equal(held.value.cpu().view_as(stored), stored), f"{held.tensor}{held.box}"
