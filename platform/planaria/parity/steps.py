"""A small job, the batches that a loader would send, and one step of any engine on its share of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from planaria.config import JobConfig, parse
from planaria.data.builder import BatchBuilder
from planaria.data.plan import micro_batch_plan
from planaria.engine.initial import first_state, seed_of
from planaria.engine.make import make_engine
from planaria.engine.protocol import Engine, StepResult
from planaria.recipe import MicroBatch, Recipe, StateReader
from planaria.runtime.groups import Groups
from planaria.state.boxes import Box

CPU = torch.device("cpu")


def small_job(overrides: Mapping[str, Any]) -> JobConfig:
    """A job of five samples per step in micro-batches of at most two, some without a picture, in float64.

    Args:
        overrides: values by dotted key, e.g. ``{"layout.sequence_parallel": False}``.

    Raises:
        ConfigError: not a job.
    """
    tree: dict[str, Any] = {
        "seed": 3,
        "data": {"max_length": 96, "scenes": {"text_only_fraction": 0.4, "max_shapes": 2}},
        "optim": {"clip_norm": None, "schedule": {"kind": "constant"}},
        "train": {"steps": 20, "global_batch": 5, "micro_batch": 2, "precision": "fp64"},
        "elastic": {"max_workers": 8},
    }
    for dotted, value in overrides.items():
        *path, leaf = dotted.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[leaf] = value
    return parse(tree)


def batches(recipe: Recipe, job: JobConfig, step: int, dp_rank: int, dp: int) -> list[MicroBatch]:
    """What a loader would send to one data-parallel rank."""
    plan = micro_batch_plan(job.train.global_batch, dp, job.train.micro_batch)
    data, size = job.data, job.train.global_batch
    builder = BatchBuilder(recipe.dataset("train"), recipe.collate, job.seed, size, data.shuffle, data.shuffle_block)
    return builder.build(step, *plan.slices[dp_rank], plan.count).micro_batches


def total_targets(recipe: Recipe, job: JobConfig, step: int) -> int:
    """Targets of the global batch of ``step``."""
    return sum(batch.targets for batch in batches(recipe, job, step, 0, 1))


def engine_of(groups: Groups, recipe: Recipe, job: JobConfig, state: StateReader | None = None) -> Engine:
    """An engine that holds ``state``; by default the state before the first step."""
    engine = make_engine(recipe, job, groups.rendezvous.layout, groups.mesh, CPU)
    engine.load(first_state(recipe, job) if state is None else state)
    return engine


def step(engine: Engine, *, on_gradients: Callable[[], None] | None = None) -> StepResult:
    """One step of ``engine`` on its share; ``on_gradients`` is called when they are complete."""
    recipe, job, layout = engine.recipe, engine.job, engine.layout
    share = batches(recipe, job, engine.step_done, layout.dp_rank(engine.mesh.get_rank()), layout.dp)

    def poll() -> tuple[int, ...]:
        if on_gradients is not None:
            on_gradients()
        return ()

    return engine.train_step(share, total_targets(recipe, job, engine.step_done), poll)


class Shaken:
    """The state before the first step, with noise on every parameter.

    Fresh weights hide errors: biases and gates start at zero, norms at one, and the gradient of whatever stands
    behind a closed gate is zero.
    """

    step = 0
    NOISE = 0.05

    def __init__(self, recipe: Recipe, job: JobConfig) -> None:
        self._state, self._seed = first_state(recipe, job), job.seed
        shapes = {name: tuple(p.shape) for name, p in recipe.build_model().named_parameters(remove_duplicate=False)}
        self._shapes = {f"model/{name}": shape for name, shape in shapes.items()}

    def read(self, tensor: str, box: Box) -> Tensor:
        """See :meth:`planaria.recipe.StateReader.read`."""
        shape = self._shapes[tensor]
        dice = torch.Generator().manual_seed(seed_of(self._seed, f"shaken {tensor}"))
        noise = self.NOISE * torch.randn(shape, generator=dice, dtype=torch.float64)
        return self._state.read(tensor, box) + noise[box.relative_to(Box.whole(shape))]
