"""A model whose layers sleep for as long as they are told: eight ranks of it fit two cores.

The engine runs it as it runs any model: stages, messages, autograd and the reduction of gradients are real.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from planaria.config import parse
from planaria.engine.native import NativeEngine
from planaria.engine.split_backward import Postponed
from planaria.recipe import Dataset, MicroBatch, ShardingRules, StageRules
from planaria.runtime.groups import Groups

WIDTH = 4


@dataclass(frozen=True)
class Times:
    """Seconds of one layer: forward, gradient of its input, gradient of its weights; and whether it trains."""

    forward: float
    input: float
    weight: float
    trains: bool = True


class _Sleep(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, times: Times, later: Postponed | None) -> Tensor:
        ctx.times, ctx.later = times, later
        time.sleep(times.forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        to_x = None
        if ctx.needs_input_grad[0]:
            time.sleep(ctx.times.input)
            to_x = grad
        to_weight = None
        if ctx.needs_input_grad[1]:
            work = partial(time.sleep, ctx.times.weight)
            if ctx.later is None or not ctx.later.add(work):
                work()
            to_weight = grad.new_zeros(WIDTH)
        return to_x, to_weight, None, None


class Sleeper(nn.Module):
    """One layer."""

    def __init__(self, times: Times) -> None:
        super().__init__()
        self.times = times
        self.weight = nn.Parameter(torch.zeros(WIDTH), requires_grad=times.trains)
        self.later: Postponed | None = None

    def postpone_to(self, later: Postponed) -> None:
        self.later = later

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Sleep.apply(x, self.weight, self.times, self.later)
        return out


class Sleepers(nn.Module):
    """A stack of layers."""

    def __init__(self, layers: Sequence[Times]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Sleeper, layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@dataclass
class SleeperRecipe:
    """Implements :class:`planaria.recipe.StagedRecipe`; ``weights`` are what the cuts balance, by layer."""

    layers: tuple[Times, ...]
    weights: tuple[float, ...]

    def dataset(self, split: str) -> Dataset:
        raise NotImplementedError("micro-batches are made by hand")

    def collate(self, samples: Sequence[Any], weights: Sequence[int]) -> MicroBatch:
        return MicroBatch({"x": np.zeros((1, 1, WIDTH), dtype=np.float32)}, targets=1)

    def build_model(self) -> nn.Module:
        return Sleepers(self.layers)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        loss: Tensor = model(batch["x"]).sum()
        return loss

    def sharding(self, model: nn.Module) -> ShardingRules:
        return ShardingRules(units=self._names)

    def stage_rules(self, model: nn.Module) -> StageRules:
        seconds = {name: (weight, 0.0) for name, weight in zip(self._names, self.weights, strict=True)}
        return StageRules(self._names, seconds=seconds)

    def resume(self, model: Any, hidden: Tensor, x: Tensor) -> Tensor:
        for layer in model.layers:
            hidden = layer(hidden)
        return hidden

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(f"layers.{index}" for index in range(len(self.layers)))


def steps(
    groups: Groups, recipe: SleeperRecipe, schedule: str, virtual: int, micros: int, count: int
) -> tuple[tuple[int, ...], list[float]]:
    """On each rank: the bounds of the stages, and how long each of ``count`` steps took, the first one left out."""
    layout = groups.rendezvous.layout
    pipeline = {"pp": layout.pp, "pipeline_schedule": schedule, "virtual_stages": virtual}
    tree = {
        "train": {"steps": count + 1, "global_batch": micros, "micro_batch": 1},
        "optim": {"name": "sgd"},
        "layout": pipeline,
        "elastic": {"max_workers": layout.world},
    }
    engine = NativeEngine(recipe, parse(tree), layout, groups.mesh, torch.device("cpu"))
    batches = [recipe.collate((), ()) for _ in range(micros)]
    taken = []
    for _ in range(count + 1):
        dist.barrier()
        began = time.perf_counter()
        engine.train_step(batches, micros)
        taken.append(time.perf_counter() - began)
    assert engine.pipeline_bounds is not None
    return engine.pipeline_bounds, taken[1:]
