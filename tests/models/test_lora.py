"""Adapters: on the right layers, harmless at first, and what peft would have trained in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tests.support.vlm import vlm_job
from torch import nn

from planaria.config import ConfigError
from planaria.engine.batches import to_device
from planaria.engine.initial import first_state
from planaria.models.lora import adapted_layers, is_adapter
from planaria.models.vlm import VLMRecipe
from planaria.state.boxes import Box


def _recipe(lora: dict[str, Any] | None, **overrides: Any) -> VLMRecipe:
    return VLMRecipe(vlm_job(model__lora=lora, **overrides))


def _trained(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_only_adapters_train_and_frozen_parts_have_none() -> None:
    names = _trained(_recipe({"rank": 2}, model__freeze=["vision"]).build_model())
    assert names and all(is_adapter(name) and ".language_model." in name for name in names)
    both = _trained(_recipe({"rank": 2, "targets": ["q_proj"]}).build_model())
    layers = {name.partition(".lora_")[0] for name in both}
    # The tower's last layer lies behind the one whose output is used: nothing there would ever get a gradient.
    assert layers == {
        *(f"model.vision_tower.encoder.layers.{n}.self_attn.q_proj" for n in (0, 1)),
        *(f"model.language_model.layers.{n}.self_attn.q_proj" for n in (0, 1, 2)),
    }


@pytest.mark.parametrize(
    ("lora", "freeze", "said"),
    [
        ({"targets": ["qkv"]}, [], r"no layer that trains is called qkv; there are down_proj, fc1"),
        ({"targets": ["fc1"]}, ["vision"], "no layer that trains is called fc1"),
        ({}, ["vision", "language"], "leaves no layer"),
    ],
)
def test_adapters_that_cannot_be_are_refused(lora: dict[str, Any], freeze: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        _recipe(lora, model__freeze=freeze).build_model()


def test_fresh_weights_have_adapters_that_change_nothing() -> None:
    recipe = _recipe({"rank": 2})
    state, plain = first_state(recipe, recipe.job), first_state(_recipe(None), vlm_job())
    name, rows = "model/model.language_model.norm.weight", Box.whole((96,))
    assert torch.equal(state.read(name, rows), plain.read(name, rows))
    name = "model/model.language_model.layers.1.mlp.up_proj.lora_{}.default.weight"
    assert state.read(name.format("A"), Box.whole((2, 96))).abs().min() > 0
    assert not state.read(name.format("B"), Box.whole((256, 2))).any()


def test_a_directory_gives_the_base_and_the_seed_the_adapters(tmp_path: Path) -> None:
    plain = VLMRecipe(vlm_job()).build_model()
    plain.save_pretrained(tmp_path)  # type: ignore[operator]
    job = vlm_job(model={"path": str(tmp_path), "lora": {"rank": 2}})
    recipe = VLMRecipe(job)
    state = first_state(recipe, job)
    whole = dict(plain.named_parameters())
    for name, parameter in recipe.build_model().named_parameters():
        value = state.read(f"model/{name}", Box.whole(parameter.shape))
        if not is_adapter(name):
            assert torch.equal(value, whole[name.replace(".base_layer.", ".")].to(value.dtype)), name
        else:
            assert bool(value.any()) == (".lora_A." in name), name
    name = next(name for name, _ in recipe.build_model().named_parameters() if ".lora_A." in name)
    part = state.read(f"model/{name}", Box((1, 3), (1, 5)))
    assert torch.equal(part, first_state(recipe, job).read(f"model/{name}", Box.whole((2, 64)))[1:2, 3:8])


def test_the_loss_and_gradients_are_those_of_peft() -> None:
    """Beside ``peft.get_peft_model`` on the plain model with the same numbers."""
    recipe = _recipe({"rank": 2, "alpha": 6.0}, model__freeze=["vision"])
    ours = recipe.build_model().double()
    model = recipe.plain_model().double()
    layers = adapted_layers(model, recipe.job.model.lora)  # type: ignore[union-attr, arg-type]
    config = peft.LoraConfig(r=2, lora_alpha=6.0, target_modules=layers)  # type: ignore[arg-type]
    theirs = peft.get_peft_model(model, config)  # type: ignore[arg-type]
    numbers = dict(ours.named_parameters())
    with torch.no_grad():
        for parameter in numbers.values():
            parameter.copy_(torch.randn_like(parameter) * 0.05)
        for name, parameter in theirs.named_parameters():
            parameter.copy_(numbers[name.removeprefix("base_model.model.")])
    from tests.support.vlm import batches

    (batch, *_) = batches(recipe, recipe.job, 0, 0, 1)
    tensors = to_device(batch, torch.device("cpu"))
    tensors = {k: t.double() if t.is_floating_point() else t for k, t in tensors.items()}
    losses = []
    for network in (ours, theirs):
        loss = recipe.loss(network, tensors)
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            own = numbers[name.removeprefix("base_model.model.")].grad
            assert own is not None and parameter.grad is not None and own.any()
            torch.testing.assert_close(own, parameter.grad, rtol=1e-10, atol=1e-14)
