"""A loss or a gradient that is not finite: whichever rank meets it, all skip the step alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from tests.support.ranks import RankPool
from tests.support.toy import ToyRecipe
from tests.support.vlm import engine_of, step
from torch import Tensor, nn

from planaria.config import parse
from planaria.engine.protocol import StepResult
from planaria.engine.schedule import lr_factor
from planaria.layout import Layout
from planaria.runtime.groups import Groups

JOB = parse(
    {
        "train": {"steps": 8, "global_batch": 6, "micro_batch": 2},
        "optim": {"lr": 0.01, "schedule": {"kind": "linear", "warmup_steps": 2}},
    }
)
FAULTY_STEP = 1
LAYOUTS = [
    Layout(),
    Layout(dp_shard=3),
    Layout(dp_replicate=3),
    Layout(dp_replicate=2, dp_shard=2),
    Layout(tp=2),
    Layout(dp_shard=2, tp=2),
]


class _Spoilt(torch.autograd.Function):
    """Identity, whose gradient is multiplied by ``value``: the loss looks well."""

    @staticmethod
    def forward(ctx, x: Tensor, value: float) -> Tensor:  # type: ignore[no-untyped-def, override]
        ctx.value = value
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def, override]
        return grad * ctx.value, None


@dataclass
class Faulty(ToyRecipe):
    """Loss or gradient of this rank is not finite while ``armed``."""

    where: str = "loss"
    value: float = math.nan
    armed: bool = False

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        loss = super().loss(model, batch)
        if not self.armed:
            return loss
        spoilt: Tensor = loss * self.value if self.where == "loss" else _Spoilt.apply(loss, self.value)
        return spoilt


def _run(groups: Groups, where: str, value: float, victim: int) -> tuple[list[StepResult], list[str], int, list[int]]:
    """Results of four steps, what the faulty one changed, steps done, and the updates counted after each."""
    recipe = Faulty(where=where, value=value)
    engine = engine_of(groups, recipe, JOB)
    results, changed, counted = [], [], []
    for number in range(4):
        recipe.armed = number == FAULTY_STEP and groups.rendezvous.rank == victim
        before = {held.tensor: held.value.clone() for held in engine.state()}
        results.append(step(engine))
        counted.append(engine.optimizer.updates)
        if number == FAULTY_STEP:
            changed = [held.tensor for held in engine.state() if not torch.equal(held.value, before[held.tensor])]
            # What is skipped leaves no gradient behind for the next step.
            changed += [shard.name for shard in engine.shards if shard.grad() is not None]
    return results, changed, engine.step_done, counted


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_all_ranks_skip_alike(pool: RankPool, layout: Layout, where: str, value: float) -> None:
    # The last rank: along tp it is one whose own loss is not even counted, so that its gradients must tell.
    answers = pool.run(layout, _run, where, value, layout.world - 1)
    for results, changed, steps, counted in answers:
        assert [result.skipped for result in results] == [False, True, False, False]
        assert changed == []
        assert steps == 4 and counted == [1, 1, 2, 3], "the step counts, the update does not"
        skipped = results[FAULTY_STEP]
        assert not (math.isfinite(skipped.loss) and math.isfinite(skipped.grad_norm))
        assert skipped.lr == 0.0
        # The schedule goes on as if nothing had happened.
        for number in (0, 2, 3):
            assert results[number].lr == pytest.approx(0.01 * lr_factor(number, 8, JOB.optim.schedule))
            assert math.isfinite(results[number].loss) and math.isfinite(results[number].grad_norm)
