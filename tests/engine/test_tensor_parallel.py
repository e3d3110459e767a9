"""What tensor parallelism refuses, and that it sums what each rank saw only in part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.ranks import RankPool
from tests.support.toy import Attention, Toy, ToyRecipe, rules
from tests.support.vlm import Held, Reference, assemble, engine_of, held, relative_errors, step
from torch import Tensor, nn

from planaria.config import JobConfig, parse
from planaria.engine.sharded import check_model
from planaria.engine.tensor_parallel import ShardingError, check_divides
from planaria.layout import Layout
from planaria.recipe import Recipe, ShardingRules
from planaria.runtime.groups import Groups


def _job(**layout: Any) -> JobConfig:
    tree = {"steps": 5, "global_batch": 5, "micro_batch": 2, "precision": "fp64"}
    return parse({"train": tree, "layout": layout, "elastic": {"max_workers": 8}, "optim": {"clip_norm": None}})


def _gradients(groups: Groups, recipe: Recipe, job: JobConfig) -> Held:
    engine = engine_of(groups, recipe, job)
    taken: list[Held] = []
    step(engine, on_gradients=lambda: taken.append(held(engine, gradients=True)))
    return taken[0]


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    # The engine builds a plain module under the job's seed; so does the reference, through first_state().
    reference = Reference(ToyRecipe(), _job())
    reference.backward()
    return reference.gradients()


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(dp_shard=2, tp=2), Layout(dp_shard=3, tp=2)], ids=str)
@pytest.mark.parametrize("sequence", [True, False], ids=["sequence", "plain"])
def test_norms_between_split_projections_get_their_whole_gradient(
    pool: RankPool, expected: dict[str, Tensor], layout: Layout, sequence: bool
) -> None:
    found = assemble(pool.run(layout, _gradients, ToyRecipe(), _job(sequence_parallel=sequence)))
    errors = relative_errors(found, expected)
    assert any("q_norm" in name for name in errors) and any("gate" in name for name in errors)
    assert max(errors.values()) < 1e-10, max(errors, key=errors.__getitem__)


def _unsummed(groups: Groups, recipe: Recipe, job: JobConfig) -> list[tuple[str, Tensor]]:
    """Gradients of the norms as one rank has them, before they are summed."""
    engine = engine_of(groups, recipe, job)
    taken: list[tuple[str, Tensor]] = []
    add_up = engine._sum_partial_gradients

    def observed() -> None:
        taken.extend((s.name, g.clone()) for s in engine.shards if (g := s.grad()) is not None and s.cut.partial)
        add_up()

    engine._sum_partial_gradients = observed  # type: ignore[method-assign]
    step(engine)
    return taken


def test_these_gradients_would_be_wrong_without_the_sum(pool: RankPool, expected: dict[str, Tensor]) -> None:
    first, second = pool.run(Layout(tp=2), _unsummed, ToyRecipe(), _job(sequence_parallel=False))
    names = [name for name, _ in first]
    assert names == [f"layers.{layer}.attention.{norm}.weight" for layer in (0, 1) for norm in ("q_norm", "k_norm")]
    for (name, one), (_, other) in zip(first, second, strict=True):
        assert not torch.allclose(one, expected[name], rtol=1e-3)
        torch.testing.assert_close(one + other, expected[name], rtol=1e-10, atol=0)


def _fail(groups: Groups, recipe: Recipe, job: JobConfig) -> str:
    try:
        step(engine_of(groups, recipe, job))
    except (ShardingError, ValueError) as error:
        return str(error)
    return ""


def _complaint(pool: RankPool, recipe: Recipe, job: JobConfig, layout: Layout | None = None) -> str:
    answers = pool.run(layout or Layout(tp=2), _fail, recipe, job)
    assert len(set(answers)) == 1, answers
    return answers[0]


def test_a_matrix_that_no_rule_covers_is_listed_with_the_remedy(pool: RankPool) -> None:
    message = _complaint(pool, ToyRecipe(rules(replicate=frozenset())), _job())
    assert "no tensor-parallel rule covers layers.0.gate.weight [16, 16], layers.1.gate.weight [16, 16]" in message
    assert "add the leaf name to colwise, rowwise or replicate in the recipe's sharding(), or train with" in message


def test_without_tensor_parallelism_no_rule_is_needed(pool: RankPool) -> None:
    assert _complaint(pool, ToyRecipe(ShardingRules()), _job(), Layout(dp_shard=2)) == ""


def test_a_count_that_tp_does_not_divide_is_named(pool: RankPool) -> None:
    with pytest.raises(ShardingError, match="tp=4 does not divide kv_heads=2; choose a tp that divides all of them"):
        check_divides(rules(heads={"heads": 8, "kv_heads": 2}), 4)
    message = _complaint(pool, ToyRecipe(rules(heads={"heads": 3})), _job())
    assert message == "tp=2 does not divide heads=3; choose a tp that divides all of them"


def test_a_width_that_tp_does_not_divide_is_named_where_no_count_says_so(pool: RankPool) -> None:
    message = _complaint(pool, ToyRecipe(rules(heads={})), _job(), Layout(tp=3))
    assert message == "tp=3 does not divide dim 0 of layers.0.attention.q_proj.weight [16, 16]"


def test_a_sequence_that_tp_does_not_divide_is_refused(pool: RankPool) -> None:
    message = _complaint(pool, ToyRecipe(length=5), _job())
    assert "tp=2 does not divide the sequence length 5; pad the sequences in collate()" in message
    assert _complaint(pool, ToyRecipe(length=5), _job(sequence_parallel=False)) == ""


def test_split_layers_need_their_counterpart_beside_them(pool: RankPool) -> None:
    lonely = rules(rowwise=frozenset({"o_proj"}), replicate=frozenset({"gate", "fc2"}))
    assert "layers.0.mlp must be a sub-module of a unit that holds both colwise" in _complaint(
        pool, ToyRecipe(lonely), _job()
    )
    # A unit that holds them directly would add its residual inside: the gradient would count once per rank.
    direct = rules(units=("layers.0.mlp", "layers.1.mlp"), sequence_parallel=())
    assert "layers.0.mlp must be a sub-module" in _complaint(pool, ToyRecipe(direct), _job())


def test_what_is_replicated_stays_whole_with_all_that_is_in_it(pool: RankPool, expected: dict[str, Tensor]) -> None:
    whole = rules(replicate=frozenset({"gate", "attention"}), heads={})
    found = assemble(pool.run(Layout(dp_shard=2, tp=2), _gradients, ToyRecipe(whole), _job(sequence_parallel=False)))
    assert max(relative_errors(found, expected).values()) < 1e-10


# Models that no layout can cut


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"units": ("layers.0", "layers.7")}, "the model has no modules layers.7"),
        ({"units": ("layers.0", "layers.0.mlp")}, "units layers.0.mlp lie inside other units"),
        ({"units": ("layers.0.mlp", "layers.0")}, "units layers.0.mlp lie inside other units"),
        ({"units": ("layers.0", "layers.0")}, "units layers.0, layers.0 lie inside other units"),
    ],
)
def test_units_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        check_model(Toy(16, 4), rules(**changes))


def test_a_tie_across_units_is_refused() -> None:
    model = Toy(16, 4)
    model.layers[1].gate.weight = model.layers[0].gate.weight
    with pytest.raises(ShardingError, match=r"layers\.0\.gate\.weight and layers\.1\.gate\.weight are one tensor"):
        check_model(model, rules())
    check_model(model, rules(units=()))


def test_scalars_and_batch_statistics_are_refused() -> None:
    model = Toy(16, 4)
    model.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ShardingError, match=r"parameters scale have no dimension to shard; give them the shape \(1,\)"):
        check_model(model, rules())
    normed = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.raises(ShardingError, match="1: batch statistics depend on how a batch is cut"):
        check_model(normed, ShardingRules())


class _Named(Attention):
    def forward(self, *, hidden: Tensor) -> Tensor:
        return super().forward(hidden)


class _NamedRecipe(ToyRecipe):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        layer = model.layers[0]
        layer.attention.__class__ = _Named
        layer.forward = lambda x: x + layer.attention(hidden=layer.norm1(x))
        return model


def test_hidden_states_under_another_name_are_asked_for(pool: RankPool) -> None:
    message = _complaint(pool, _NamedRecipe(), _job(sequence_parallel=False))
    assert "_Named is called without its hidden states; pass them first or as hidden_states=" in message
