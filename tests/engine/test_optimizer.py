"""The optimizer on local shards: groups, rates, state in and out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.support.ranks import RankPool
from tests.support.toy import ToyRecipe
from tests.support.vlm import engine_of, step, vlm_job
from torch import Tensor, nn

from planaria.config import JobConfig, OptimConfig, parse
from planaria.engine.optimizer import ShardedOptimizer
from planaria.engine.protocol import UPDATES
from planaria.engine.sharded import Shard
from planaria.engine.tensor_parallel import TPCut
from planaria.layout import Layout
from planaria.models.vlm import VLMRecipe
from planaria.runtime.groups import Groups
from planaria.state.boxes import Box
from planaria.state.writer import Piece


def _shards() -> list[Shard]:
    torch.manual_seed(0)
    shapes = {
        "tower.weight": (4, 3),
        "tower.bias": (4,),
        "head.weight": (2, 4),
        "head.bias": (2,),
        "frozen.weight": (3, 3),
    }
    return [
        Shard(
            name,
            nn.Parameter(torch.randn(shape, dtype=torch.float64), requires_grad="frozen" not in name),
            shape,
            Box.whole(shape),
            TPCut(),
            frozenset(),
            True,
            1,
        )
        for name, shape in shapes.items()
    ]


def _config(**settings: Any) -> OptimConfig:
    return OptimConfig.model_validate({"schedule": {"kind": "linear", "min_ratio": 0.0}, **settings})


def _scale(name: str) -> float:
    return 0.1 if name.startswith("tower") else 1.0


def test_only_matrices_decay_and_each_part_has_its_rate() -> None:
    optimizer = ShardedOptimizer(_shards(), _config(lr=0.5, weight_decay=0.3), 10, _scale)
    found = {}
    names = {id(view): shard.name for shard, view in zip(optimizer.shards, optimizer._views, strict=True)}
    for group in optimizer.torch.param_groups:
        for view in group["params"]:
            found[names[id(view)]] = (group["lr"], group["weight_decay"])
    assert found == {
        "tower.weight": (0.05, 0.3),
        "tower.bias": (0.05, 0.0),
        "head.weight": (0.5, 0.3),
        "head.bias": (0.5, 0.0),
    }  # what is frozen is not there


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_parameter_without_gradient_is_treated_as_one_of_gradient_zero(name: str) -> None:
    shards = _shards()
    optimizer = ShardedOptimizer(shards, _config(name=name, lr=0.5, weight_decay=0.1), 10, lambda _: 1.0)
    before = [shard.local().clone() for shard in shards]
    shards[0].parameter.grad = torch.ones_like(shards[0].parameter)
    assert optimizer.step(0, 1.0) == 0.5
    for shard, old in zip(shards[1:], before[1:], strict=True):
        decayed = len(shard.global_shape) > 1 and shard.parameter.requires_grad
        torch.testing.assert_close(shard.local(), old * (0.95 if decayed else 1.0))
    assert not torch.equal(shards[0].local(), before[0])


def _drive(optimizer: ShardedOptimizer, steps: range) -> None:
    for number in steps:
        for shard in optimizer.shards:
            generator = torch.Generator().manual_seed(number)
            shard.parameter.grad = torch.randn(shard.global_shape, generator=generator, dtype=torch.float64)
        optimizer.step(number, 0.5)


@pytest.mark.parametrize(
    "settings", [{}, {"name": "sgd", "momentum": 0.9}, {"name": "sgd"}], ids=["adamw", "momentum", "sgd"]
)
def test_state_goes_out_and_in_without_a_trace(settings: dict[str, Any]) -> None:
    shards, others = _shards(), _shards()
    straight = ShardedOptimizer(shards, _config(**settings), 10, _scale)
    _drive(straight, range(6))
    first = ShardedOptimizer(others, _config(**settings), 10, _scale)
    _drive(first, range(3))
    stored = {(key, shard.name): value.clone() for key, shard, value in first.state()}
    assert {key for key, _ in stored} == set(first.keys)
    second = ShardedOptimizer(others, _config(**settings), 10, _scale)
    second.load(lambda key, shard: stored[key, shard.name], first.updates)
    _drive(second, range(3, 6))
    for shard, other in zip(shards, others, strict=True):
        assert torch.equal(shard.local(), other.local()), shard.name


class _Pieces:
    """A state in memory, from the pieces of one rank."""

    def __init__(self, step: int, pieces: Iterator[Piece]) -> None:
        self.step = step
        self.held = {piece.tensor: piece.data.clone() for piece in pieces}

    def read(self, tensor: str, box: Box) -> Tensor:
        whole = self.held[tensor]
        return whole[box.relative_to(Box.whole(whole.shape))]


def _round_trip(groups: Groups, job: JobConfig) -> tuple[list[str], list[str], list[float], list[float], int]:
    recipe = VLMRecipe(job)
    engine = engine_of(groups, recipe, job)
    step(engine)
    # A step that is skipped: the count of updates falls behind that of steps, and must survive.
    engine.optimizer.torch.zero_grad()
    sums = engine._global_sums
    engine._global_sums = lambda *_: (float("nan"), 1.0, ())  # type: ignore[method-assign]
    assert step(engine).skipped
    engine._global_sums = sums  # type: ignore[method-assign]
    state = _Pieces(engine.step_done, engine.pieces())
    expected = sorted(engine.expected())
    undisturbed = [step(engine).loss for _ in range(3)]
    second = engine_of(groups, recipe, job)
    second.load(state)
    updates = second.optimizer.updates
    resumed = [step(second).loss for _ in range(3)]
    return sorted(state.held), expected, undisturbed, resumed, updates


def test_an_engine_resumes_from_its_pieces_also_after_a_skipped_step(pool: RankPool) -> None:
    ((held, expected, undisturbed, resumed, updates),) = pool.run(Layout(), _round_trip, vlm_job())
    assert held == expected and UPDATES in held
    assert updates == 1
    assert resumed == undisturbed


def _score_load_score(groups: Groups, job: JobConfig) -> bool:
    """Whether scores follow a load() that comes after a score: no gathered weights may linger."""

    class Scored(ToyRecipe):
        def score(self, model: nn.Module, batch: Any) -> Tensor:
            return model(batch["x"]).double().sum(-1)

    recipe = Scored()
    engine = engine_of(groups, recipe, job)
    batch = recipe.collate([recipe.dataset("val")[0]], [1])
    engine.score(batch)

    class Doubled:
        step = 0

        def read(self, tensor: str, box: Box) -> Tensor:
            return torch.full(box.shape, 0.25)

    engine.load(Doubled())
    fresh = engine_of(groups, recipe, job)
    fresh.load(Doubled())
    return torch.equal(engine.score(batch), fresh.score(batch))


def test_a_state_loaded_after_scoring_counts(pool: RankPool) -> None:
    job = parse({"train": {"steps": 1, "global_batch": 2}})
    assert pool.run(Layout(dp_shard=2), _score_load_score, job) == [True, True]
