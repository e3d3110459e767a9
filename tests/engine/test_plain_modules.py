"""Things that users' modules do: skip a part of the model, drop out, hold buffers."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from tests.support.ranks import RankPool
from tests.support.toy import Toy, ToyRecipe
from tests.support.vlm import Held, Reference, assemble, engine_of, held, relative_errors, step
from torch import Tensor, nn

from planaria.config import JobConfig, parse
from planaria.layout import Layout
from planaria.recipe import Recipe
from planaria.runtime.groups import Groups


def _job(**layout: bool) -> JobConfig:
    train = {"steps": 5, "global_batch": 5, "micro_batch": 1, "precision": "fp64"}
    return parse({"train": train, "layout": layout, "optim": {"clip_norm": None}})


def _gradients(groups: Groups, recipe: Recipe, job: JobConfig) -> tuple[float, Held]:
    engine = engine_of(groups, recipe, job)
    taken: list[Held] = []
    result = step(engine, on_gradients=lambda: taken.append(held(engine, gradients=True)))
    return result.loss, taken[0]


class _Branching(Toy):
    """Reaches ``second`` only for some samples, and ``never`` for none."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.second, self.never = nn.Linear(3, 5), nn.Linear(3, 5)

    def forward(self, x_BLF: Tensor) -> Tensor:
        out = super().forward(x_BLF)
        chosen_B = x_BLF[:, 0, 0] > 0
        return out + chosen_B[:, None] * self.second(x_BLF).mean(1) if chosen_B.any() else out


class _BranchingRecipe(ToyRecipe):
    def build_model(self) -> nn.Module:
        return _Branching(self.width, self.heads)


@pytest.mark.parametrize(
    "layout", [Layout(dp_shard=2), Layout(dp_shard=4), Layout(dp_replicate=3), Layout(dp_shard=2, tp=2)], ids=str
)
def test_a_part_that_only_some_ranks_reach_gets_its_gradient(pool: RankPool, layout: Layout) -> None:
    reference = Reference(_BranchingRecipe(), _job())
    loss = reference.backward()
    expected = reference.gradients()
    assert expected["second.weight"].abs().max() > 0 and expected["never.weight"].abs().max() == 0
    answers = pool.run(layout, _gradients, _BranchingRecipe(), _job())
    found = assemble(part for _, part in answers)
    for name in ("never.weight", "never.bias"):
        found.setdefault(name, torch.zeros_like(expected[name]))
    assert max(relative_errors(found, expected).values()) < 1e-10
    assert [value for value, _ in answers] == pytest.approx([loss] * len(answers), rel=1e-10)


class _DropoutRecipe(ToyRecipe):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.enter = nn.Sequential(model.enter, nn.Dropout(0.5))  # type: ignore[assignment]
        return model


def test_dropout_is_alike_in_a_tensor_parallel_group(pool: RankPool) -> None:
    answers = pool.run(Layout(dp_shard=2, tp=2), _gradients, _DropoutRecipe(), _job())
    assemble(part for _, part in answers)  # fails where replicas differ
    again = pool.run(Layout(dp_shard=2, tp=2), _gradients, _DropoutRecipe(), _job())
    assert [loss for loss, _ in again] == [loss for loss, _ in answers]
    (plain, _), *_ = pool.run(Layout(), _gradients, ToyRecipe(), _job())
    assert plain != answers[0][0]


class _Scaled(Toy):
    """Holds a constant as a buffer, one that checkpoints leave out, and a count."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.register_buffer("scale", torch.rand(3), persistent=False)
        self.register_buffer("count", torch.arange(3))

    def forward(self, x_BLF: Tensor) -> Tensor:
        return super().forward(x_BLF * self.scale * self.count)


class _ScaledRecipe(ToyRecipe):
    def build_model(self) -> nn.Module:
        return _Scaled(self.width, self.heads)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        assert model.get_buffer("count").dtype == torch.int64
        return super().loss(model, batch)


def test_buffers_of_a_plain_module_are_the_same_on_every_layout(pool: RankPool) -> None:
    ((expected, _),) = pool.run(Layout(), _gradients, _ScaledRecipe(), _job())
    for layout in (Layout(dp_shard=3), Layout(tp=2)):
        for loss, _ in pool.run(layout, _gradients, _ScaledRecipe(), _job()):
            assert loss == pytest.approx(expected, rel=1e-10)
