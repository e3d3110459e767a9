"""Initial weights: those of the model's own code, on every layout alike, one unit at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.support.ranks import RankPool
from tests.support.toy import ToyRecipe
from tests.support.vlm import Held, assemble, engine_of, held, vlm_job
from torch import Tensor, nn

from planaria.config import JobConfig, parse
from planaria.engine import initial
from planaria.engine.initial import InitialState, build, first_state, materialise, seed_of
from planaria.layout import Layout
from planaria.models.vlm import VLMRecipe
from planaria.runtime.groups import Groups
from planaria.state.boxes import Box

PRESETS = ("llava-tiny", "llava-siglip-qwen-tiny")


def _whole(preset: str, **overrides: Any) -> dict[str, Tensor]:
    job = vlm_job(preset, train__precision="fp32", **overrides)
    recipe = VLMRecipe(job)
    state = InitialState(recipe, job)
    shapes = {name: tuple(p.shape) for name, p in build(recipe, job).named_parameters()}
    return {name: state.read(f"model/{name}", Box.whole(shape)).clone() for name, shape in shapes.items()}


@pytest.mark.parametrize("preset", PRESETS)
def test_weights_are_distributed_as_the_model_itself_would_draw_them(preset: str) -> None:
    recipe = VLMRecipe(vlm_job(preset))
    torch.manual_seed(0)
    own = dict(recipe.build_model().named_parameters())  # on the CPU, by transformers
    found = _whole(preset)
    assert found.keys() == own.keys()
    for name, reference in own.items():
        value = found[name]
        if reference.numel() > 1 and reference.std() > 0:
            spread = value.std().item() / reference.std().item()
            assert abs(spread - 1) < 6 / math.sqrt(value.numel()), f"{name}: {spread}"
            assert abs(value.mean().item()) < 6 * value.std().item() / math.sqrt(value.numel()), name
        else:  # norms are 1, biases 0
            assert torch.equal(value, reference), name


def test_units_are_drawn_from_seeds_of_their_own() -> None:
    found = _whole("llava-tiny")
    layers = [found[f"model.language_model.layers.{layer}.mlp.up_proj.weight"] for layer in range(3)]
    assert not torch.equal(layers[0], layers[1]) and not torch.equal(layers[1], layers[2])
    again, other = _whole("llava-tiny"), _whole("llava-tiny", seed=4)
    for name, value in found.items():
        assert torch.equal(value, again[name]), name
        assert torch.equal(value, other[name]) == (value.std() == 0).item(), name
    assert seed_of(1, "a") != seed_of(2, "a") != seed_of(2, "b")


def test_the_global_random_state_is_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    _whole("llava-tiny")
    assert torch.equal(torch.rand(3), expected)


def test_any_box_is_a_part_of_the_same_tensor() -> None:
    job = vlm_job()
    state = InitialState(VLMRecipe(job), job)
    name = "model/model.language_model.layers.1.mlp.up_proj.weight"
    whole = state.read(name, Box.whole((256, 96)))
    assert torch.equal(state.read(name, Box((7, 3), (20, 90))), whole[7:27, 3:93])
    assert state.read(name, Box((256, 0), (0, 96))).numel() == 0
    with pytest.raises(KeyError, match="holds no optim/exp_avg/x"):
        state.read("optim/exp_avg/x", Box.whole((1,)))


def _loaded(groups: Groups, job: JobConfig, toy: bool) -> tuple[Held, dict[str, Tensor], list[list[str]]]:
    recipe = ToyRecipe() if toy else VLMRecipe(job)
    engine = engine_of(groups, recipe, job)
    buffers = {name: buffer.clone() for name, buffer in engine.model.named_buffers()}
    return held(engine, gradients=False), buffers, initial.tied_names(engine.model)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_layout_starts_from_the_same_weights_buffers_and_ties(pool: RankPool, preset: str) -> None:
    job = vlm_job(preset, train__precision="fp32")
    own = VLMRecipe(job).build_model()
    expected = _whole(preset)
    for layout in (Layout(), Layout(dp_shard=3), Layout(dp_shard=2, tp=2)):
        answers = pool.run(layout, _loaded, job, False)
        found = assemble(part for part, _, _ in answers)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        for _, buffers, ties in answers:
            assert {"position_ids", "inv_freq"} <= {name.rpartition(".")[2] for name in buffers}
            for name, buffer in own.named_buffers():
                assert torch.equal(buffers[name], buffer) and buffers[name].dtype == buffer.dtype, name
            assert ties == initial.tied_names(own)
    assert bool(initial.tied_names(own)) == (preset == "llava-siglip-qwen-tiny")


def test_a_plain_module_starts_from_the_seed_of_the_job_on_every_layout(pool: RankPool) -> None:
    job = parse({"seed": 11, "train": {"steps": 1, "global_batch": 1}})
    torch.manual_seed(11)
    own = dict(ToyRecipe().build_model().named_parameters())
    for layout in (Layout(dp_shard=3), Layout(dp_shard=2, tp=2)):
        found = assemble(part for part, _, _ in pool.run(layout, _loaded, job, True))
        assert all(torch.equal(found[name], value) for name, value in own.items())


def test_only_one_unit_is_in_memory_beside_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def watched(recipe: Any, job: Any, model: nn.Module, name: str, without: Any) -> nn.Module:
        module = materialise(recipe, job, model, name, without)

        made.append(name)
        return module

    monkeypatch.setattr(initial, "materialise", watched)
    job = vlm_job()
    recipe = VLMRecipe(job)
    model = build(recipe, job)
    state = InitialState(recipe, job)
    largest = 0
    for name, parameter in model.named_parameters():
        state.read(f"model/{name}", Box.whole(parameter.shape))
        largest = max(largest, len(state._unit[1]))
        assert set(state._unit[1]) <= {n for n, _ in model.named_parameters() if n.startswith(state._unit[0])}
    units = recipe.sharding(model).units
    assert sorted(made) == sorted(("", *units))  # each once
    assert largest < 20


class _Forgetful(VLMRecipe):
    def init_module(self, model: nn.Module, name: str, module: nn.Module) -> None:
        if not name.endswith("layers.1"):
            super().init_module(model, name, module)


def test_what_is_left_uninitialised_is_named() -> None:
    job = vlm_job()
    state = InitialState(_Forgetful(job), job)
    state.read("model/model.language_model.layers.0.mlp.up_proj.weight", Box.whole((256, 96)))
    with pytest.raises(RuntimeError, match=r"_Forgetful.init_module does not initialise .*layers\.1\.mlp\.up_proj"):
        state.read("model/model.language_model.layers.1.mlp.up_proj.weight", Box.whole((256, 96)))


def test_a_recipe_may_bring_its_own_state() -> None:
    class Given:
        step = 0

        def read(self, tensor: str, box: Box) -> Tensor:
            return torch.ones(box.shape)

    class WithState(ToyRecipe):
        def initial_state(self, job: JobConfig) -> Given:
            return given

    given, job = Given(), parse({"train": {"steps": 1, "global_batch": 1}})
    assert first_state(WithState(), job) is given
    assert isinstance(first_state(ToyRecipe(), job), InitialState)
    vlm = vlm_job()
    assert isinstance(first_state(VLMRecipe(vlm), vlm), InitialState)  # no model.path: fresh weights
