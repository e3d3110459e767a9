"""Activations that are computed again: the same gradients, the same names, and really less that is kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tests.support.ranks import RankPool
from tests.support.vlm import Held, Reference, assemble, engine_of, held, relative_errors, step, vlm_job
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from planaria.config import JobConfig
from planaria.engine.recompute import apply_recompute
from planaria.engine.tensor_parallel import ShardingError
from planaria.layout import Layout
from planaria.models.vlm import VLMRecipe
from planaria.runtime.groups import Groups


def _gradients(groups: Groups, job: JobConfig) -> Held:
    engine = engine_of(groups, VLMRecipe(job), job)
    taken: list[Held] = []
    step(engine, on_gradients=lambda: taken.append(held(engine, gradients=True)))
    return taken[0]


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    reference = Reference(VLMRecipe(vlm_job()), vlm_job())
    reference.backward()
    return reference.gradients()


@pytest.mark.parametrize("mode", ["unit", "selective"])
@pytest.mark.parametrize("layout", [Layout(dp_shard=2), Layout(dp_shard=2, tp=2)], ids=str)
def test_gradients_are_those_of_one_process(
    pool: RankPool, layout: Layout, mode: str, expected: dict[str, Tensor]
) -> None:
    found = assemble(pool.run(layout, _gradients, vlm_job(train__recompute=mode)))
    errors = relative_errors(found, expected)  # which compares the names, too
    assert max(errors.values()) < 1e-9


class Watching(VLMRecipe):
    """Notes which activations of the first decoder layer live between forward and backward pass, and how often the
    layer was computed."""

    def __init__(self, job: JobConfig) -> None:
        super().__init__(job)
        self.kept: list[dict[str, bool]] = []
        self.calls: list[str] = []
        self.hooked = False

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        refs: dict[str, StorageWeakRef] = {}

        def watch(name: str, module: nn.Module) -> None:
            def hook(_: nn.Module, __: Any, out: Tensor) -> None:
                self.calls.append(name)
                refs.setdefault(name, StorageWeakRef(out.untyped_storage()))

            module.register_forward_hook(hook)

        layer = model.get_submodule("model.language_model.layers.0")
        if not self.hooked:
            self.hooked = True
            watch("up_proj", layer.get_submodule("mlp.up_proj"))
            watch("act_fn", layer.get_submodule("mlp.act_fn"))
            watch("tower", model.get_submodule("model.vision_tower.encoder.layers.0.mlp.fc1"))
        loss = super().loss(model, batch)
        self.kept.append({name: not ref.expired() for name, ref in refs.items()})
        return loss


def _watched(groups: Groups, job: JobConfig) -> tuple[dict[str, bool], dict[str, int]]:
    recipe = Watching(job)
    engine = engine_of(groups, recipe, job)
    step(engine)
    return recipe.kept[0], {name: recipe.calls.count(name) for name in ("up_proj", "act_fn", "tower")}


@pytest.mark.parametrize(
    ("mode", "kept", "times"),
    [
        ("none", {"up_proj": True, "act_fn": True, "tower": False}, {"up_proj": 1, "act_fn": 1, "tower": 1}),
        ("unit", {"up_proj": False, "act_fn": False, "tower": False}, {"up_proj": 2, "act_fn": 2, "tower": 1}),
        ("selective", {"up_proj": True, "act_fn": False, "tower": False}, {"up_proj": 2, "act_fn": 2, "tower": 1}),
    ],
)
def test_what_is_kept_until_the_backward_pass(
    pool: RankPool, mode: str, kept: dict[str, bool], times: dict[str, int]
) -> None:
    # The tower is frozen, and nothing before it trains: no mode keeps or repeats anything of it.
    job = vlm_job(train__recompute=mode, train__global_batch=2, model__freeze=["vision"])
    for found, counted in pool.run(Layout(), _watched, job):
        assert (found, counted) == (kept, times)


class _Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x).square().sum()
        return out


@pytest.mark.parametrize("mode", ["unit", "selective"])
def test_dropout_falls_alike_the_second_time(mode: str) -> None:
    gradients = []
    for chosen in ("none", mode):
        torch.manual_seed(0)
        model = _Noisy()
        apply_recompute(model, ["layer"], chosen)
        model(torch.ones(3, 4)).backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, again in zip(*gradients, strict=True):
        assert plain is not None and again is not None and torch.equal(plain, again)


def test_without_units_it_would_do_nothing() -> None:
    with pytest.raises(ShardingError, match=r"ShardingRules\.units"):
        apply_recompute(_Noisy(), (), "unit")


# A frozen tower before everything that trains


class Graphs(VLMRecipe):
    """Notes whether outputs of the vision tower and of the projector belong to a graph."""

    seen: list[tuple[bool, bool]]

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        outputs: dict[str, bool] = {}

        def note(name: str) -> Any:
            def hook(_: nn.Module, __: Any, out: Any) -> None:
                tensors = [t for t in (out.values() if isinstance(out, Mapping) else [out]) if isinstance(t, Tensor)]
                outputs[name] = any(t.requires_grad or t.grad_fn is not None for t in tensors)

            return hook

        parts = {"tower": model.get_submodule("model.vision_tower")}
        parts["projector"] = model.get_submodule("model.multi_modal_projector")
        handles = [module.register_forward_hook(note(name)) for name, module in parts.items()]
        loss = super().loss(model, batch)
        for handle in handles:
            handle.remove()
        self.seen.append((outputs["tower"], outputs["projector"]))
        return loss


def _graphs(groups: Groups, job: JobConfig) -> list[tuple[bool, bool]]:
    recipe: Any = Graphs(job)
    recipe.seen = []
    step(engine_of(groups, recipe, job))
    return list(recipe.seen)


@pytest.mark.parametrize(("freeze", "graph"), [(["vision"], False), ([], True)])
@pytest.mark.parametrize("mode", ["none", "unit"])
def test_a_frozen_tower_has_no_graph(pool: RankPool, freeze: list[str], graph: bool, mode: str) -> None:
    job = vlm_job(model__freeze=freeze, train__recompute=mode, train__global_batch=2, train__precision="bf16")
    layout = Layout(tp=2) if mode == "unit" else Layout(dp_shard=2)
    for seen in pool.run(layout, _graphs, job):
        assert seen and all(found == (graph, True) for found in seen)
