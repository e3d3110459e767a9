"""Small vision-language jobs, the undisturbed mathematics of one process, and states put together from boxes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from planaria.config import JobConfig, parse
from planaria.data.builder import BatchBuilder
from planaria.data.plan import micro_batch_plan
from planaria.engine.initial import DTYPES, first_state
from planaria.engine.make import make_engine
from planaria.engine.native import NativeEngine
from planaria.engine.protocol import Engine
from planaria.recipe import MicroBatch, Recipe
from planaria.runtime.groups import Groups
from planaria.state.boxes import Box, uncovered

CPU = torch.device("cpu")


def vlm_job(preset: str = "llava-tiny", **overrides: Any) -> JobConfig:
    """A job of five samples per step in micro-batches of at most two, some without a picture.

    ``overrides`` are dotted keys, with ``__`` for the dot.
    """
    tree: dict[str, Any] = {
        "seed": 3,
        "model": {"preset": preset},
        "data": {"max_length": 96, "scenes": {"text_only_fraction": 0.4, "max_shapes": 2}},
        "optim": {"clip_norm": None, "schedule": {"kind": "constant"}},
        "train": {"steps": 20, "global_batch": 5, "micro_batch": 2, "precision": "fp64"},
        "elastic": {"max_workers": 8},
    }
    for dotted, value in overrides.items():
        *path, leaf = dotted.split("__")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[leaf] = value
    return parse(tree)


def batches(recipe: Recipe, job: JobConfig, step: int, dp_rank: int, dp: int) -> list[MicroBatch]:
    """What a loader would send to one data-parallel rank."""
    plan = micro_batch_plan(job.train.global_batch, dp, job.train.micro_batch)
    builder = BatchBuilder(recipe.dataset("train"), recipe.collate, job.seed, job.train.global_batch, job.data.shuffle)
    return builder.build(step, *plan.slices[dp_rank], plan.count).micro_batches


def total_targets(recipe: Recipe, job: JobConfig, step: int) -> int:
    return sum(batch.targets for batch in batches(recipe, job, step, 0, 1))


def engine_of(groups: Groups, recipe: Recipe, job: JobConfig) -> NativeEngine:
    """A native engine with the state before the first step."""
    engine = NativeEngine(recipe, job, groups.rendezvous.layout, groups.mesh, CPU)
    engine.load(first_state(recipe, job))
    return engine


def any_engine_of(groups: Groups, recipe: Recipe, job: JobConfig) -> Engine:
    """The engine that the job asks for, with the state before the first step."""
    engine = make_engine(recipe, job, groups.rendezvous.layout, groups.mesh, CPU)
    engine.load(first_state(recipe, job))
    return engine


def step(engine: Engine, *, on_gradients: Callable[[], None] | None = None) -> Any:
    """One step of ``engine`` on its share; ``on_gradients`` is called when they are complete."""
    recipe, job, layout = engine.recipe, engine.job, engine.layout
    share = batches(recipe, job, engine.step_done, layout.dp_rank(engine.mesh.get_rank()), layout.dp)

    def poll() -> tuple[int, ...]:
        if on_gradients is not None:
            on_gradients()
        return ()

    return engine.train_step(share, total_targets(recipe, job, engine.step_done), poll)


Held = list[tuple[str, tuple[int, ...], Box, Tensor | None]]
"""(name, global shape, box, value) of what one rank holds."""


def held(engine: NativeEngine, *, gradients: bool) -> Held:
    """Copies of this rank's parameters or gradients."""
    found: Held = []
    for shard in engine.shards:
        if gradients and not shard.parameter.requires_grad:
            continue
        value = shard.grad() if gradients else shard.local()
        found.append((shard.name, shard.global_shape, shard.box, None if value is None else value.clone()))
    return found


def held_of(engine: Engine, kind: str = "model/") -> Held:
    """Copies of what this rank holds of the state, of tensors whose names begin with ``kind``, without that."""
    return [
        (item.tensor.removeprefix(kind), item.global_shape, item.box, item.value.clone())
        for item in engine.state()
        if item.tensor.startswith(kind)
    ]


def assemble(ranks: Iterable[Held]) -> dict[str, Tensor]:
    """Global tensors of all ranks' boxes; fails on what is missing or differs between replicas."""
    whole: dict[str, Tensor] = {}
    boxes: dict[str, list[Box]] = {}
    for name, shape, box, value in (entry for rank in ranks for entry in rank):
        if value is None:
            assert box.empty, f"no value for {name}{box}"
            continue
        target = whole.setdefault(name, torch.full(shape, math.nan, dtype=value.dtype))
        part = target[box.relative_to(Box.whole(shape))]
        known = ~part.isnan()
        torch.testing.assert_close(value[known], part[known], rtol=1e-9, atol=1e-13, msg=f"replicas of {name}{box}")
        part.copy_(value)
        boxes.setdefault(name, []).append(box)
    for name, tensor in whole.items():
        assert not uncovered(Box.whole(tensor.shape), boxes[name]), f"{name} is not covered"
    return whole


class Reference:
    """The model as Hugging Face (or its author) wrote it, trained by plain torch in this one process."""

    def __init__(self, recipe: Recipe, job: JobConfig) -> None:
        self.recipe, self.job = recipe, job
        self.model: nn.Module = recipe.build_model().to(DTYPES[job.train.precision])
        state = first_state(recipe, job)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(state.read(f"model/{name}", Box.whole(parameter.shape)))
        self.step_done = 0

    def backward(self) -> float:
        """Gradients of the mean target loss over the whole global batch; returns that loss."""
        self.model.zero_grad()
        train = self.job.train.model_copy(update={"micro_batch": self.job.train.global_batch})
        whole = batches(self.recipe, self.job.model_copy(update={"train": train}), self.step_done, 0, 1)
        assert len(whole) == 1
        targets = sum(batch.targets for batch in whole)
        total = 0.0
        for batch in whole:
            tensors = {key: torch.from_numpy(array.copy()) for key, array in batch.arrays.items()}
            dtype = DTYPES[self.job.train.precision]
            tensors = {k: t.to(dtype) if t.is_floating_point() else t for k, t in tensors.items()}
            loss = self.recipe.loss(self.model, tensors) / targets
            loss.backward()
            total += loss.item()
        return total

    def gradients(self) -> dict[str, Tensor]:
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in self.model.named_parameters()
            if p.requires_grad
        }

    def parameters(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def optimizer(self) -> torch.optim.Optimizer:
        """Plain torch, with the decay that the configuration promises."""
        optim = self.job.optim
        trained = [p for p in self.model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": optim.weight_decay},
            {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
        ]
        if optim.name == "adamw":
            return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps)
        return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum)


def relative_errors(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], floor: float = 1e-12
) -> dict[str, float]:
    """Largest difference of each tensor over its largest value; where that is under ``floor``, an absolute one
    is measured against ``floor`` (gradients that are mathematically zero)."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    errors = {}
    for name, reference in expected.items():
        size = reference.abs().max().item()
        difference = (found[name] - reference).abs().max().item()
        errors[name] = difference / size if size > floor else (0.0 if difference < floor else math.inf)
    return errors
