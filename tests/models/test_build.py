"""From a model section to a model: what is refused and how, what is frozen, how many tokens a picture takes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.vlm import vlm_job
from transformers import ByT5Tokenizer, CLIPVisionConfig

from planaria.config import ConfigError, parse
from planaria.data.sample import Sample
from planaria.engine.batches import to_device
from planaria.models import build
from planaria.models.presets import PRESETS
from planaria.models.vlm import VLMRecipe


def _tree(preset: str = "llava-tiny", **changes: Any) -> dict[str, Any]:
    """An inline config: a preset with changes at dotted keys (``__`` for the dot)."""
    tree = copy.deepcopy(PRESETS[preset])
    for dotted, value in changes.items():
        *path, leaf = dotted.split("__")
        node = tree
        for part in path:
            node = node[part]
        node[leaf] = value
    return tree


def _recipe(tree: dict[str, Any], **overrides: Any) -> VLMRecipe:
    return VLMRecipe(vlm_job(model={"config": tree}, **overrides))


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({}, "model.config.model_type: None is not supported; use one of llava"),
        (
            {"model_type": "bert"},
            "model: model_type 'bert' is not supported: transformers has no image-text model",
        ),
        (
            _tree(vision_config__model_type="vit"),
            "model.config.vision_config.model_type: 'vit' is not supported; use one of clip_vision_model",
        ),
        (_tree(text_config__model_type="gpt2"), "model.config.text_config.model_type: 'gpt2' is not supported; use"),
        (_tree(text_config__model_type="nope"), "model.config: transformers refuses it: "),
        (
            _tree(vision_config__image_size=30),
            "model.config.vision_config.image_size: 30 is not a multiple of patch_size 8",
        ),
        (
            _tree(text_config__vocab_size=100),
            "model.config.text_config.vocab_size: 100 is smaller than the tokenizer's 384; leave it out or raise it",
        ),
        (_tree(vision_feature_layer=7), "model.config.vision_feature_layer: 7 is outside -4..3"),
        (_tree(vision_feature_layer=[-2, -9]), "model.config.vision_feature_layer: -9 is outside -4..3"),
        (_tree(vision_config__num_attention_heads=5), "The hidden size (64) is not a multiple of the number of"),
    ],
)
def test_a_config_that_cannot_be_is_refused(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _ = _recipe(tree).config
    assert message in str(caught.value)


def test_an_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'llava-huge' is unknown; choose one of llava-tiny, llava-siglip-qwen-tiny"):
        _ = VLMRecipe(vlm_job("llava-huge")).config


def test_a_job_without_a_model_section_needs_a_recipe() -> None:
    with pytest.raises(ConfigError, match=r"model: missing; add it .* or give the trainer a recipe of your own"):
        VLMRecipe(parse({"train": {"steps": 1, "global_batch": 1}}))


def test_a_folder_without_a_readable_config_is_refused(tmp_path: Path) -> None:
    recipe = VLMRecipe(vlm_job(model={"path": str(tmp_path)}))
    with pytest.raises(ConfigError, match=r"holds no config\.json; give a local Hugging Face model directory"):
        _ = recipe.config
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        _ = VLMRecipe(vlm_job(model={"path": str(tmp_path)})).config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_token_id": 7}, r"data.tokenizer: its image token is 259, but the model at .* uses 7; give the"),
        ({"vocab": 300}, r"data.tokenizer: it has 384 ids, but the model at .* embeds only 300; give the tokenizer"),
    ],
)
def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path, change: dict[str, int], message: str) -> None:
    config = _recipe(_tree()).config
    config.image_token_id = change.get("image_token_id", config.image_token_id)
    config.text_config.vocab_size = change.get("vocab", 384)
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=message):
        _ = VLMRecipe(vlm_job(model={"path": str(tmp_path)})).config
    assert len(ByT5Tokenizer()) == 384


# Frozen parts


PARTS = {"vision": ".vision_tower.", "projector": ".multi_modal_projector.", "language": ".language_model."}


@pytest.mark.parametrize("freeze", [("vision",), ("projector",), ("language",), ("vision", "language")])
def test_frozen_parts_do_not_train_and_the_others_do(freeze: tuple[str, ...]) -> None:
    with torch.device("meta"):
        model = _recipe(_tree(vision_feature_layer=-1), model__freeze=list(freeze)).build_model()
    for name, parameter in model.named_parameters():
        part = next((part for part, infix in PARTS.items() if infix in name), "language")  # lm_head
        tail = "post_layernorm" in name
        assert parameter.requires_grad == (part not in freeze and not tail), name


@pytest.mark.parametrize("preset", ["llava-tiny", "llava-siglip-qwen-tiny"])
@pytest.mark.parametrize("layer", [-2, -1, [-3, -2], 1], ids=str)
def test_exactly_what_gets_no_gradient_is_frozen(preset: str, layer: Any) -> None:
    recipe = _recipe(_tree(preset, vision_feature_layer=layer))
    model = recipe.build_model()
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    model.requires_grad_(True)
    picture = np.zeros((32, 32, 3), dtype=np.uint8)
    batch = recipe.collate([Sample("a", picture, "what?", "this")], [1])
    recipe.loss(model, to_device(batch, torch.device("cpu"))).backward()
    assert frozen == {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert frozen or (preset, layer) == ("llava-siglip-qwen-tiny", -1)


# Pictures


@pytest.mark.parametrize(
    ("preset", "strategy", "tokens"),
    [
        ("llava-tiny", "default", 16),
        ("llava-tiny", "full", 17),
        ("llava-siglip-qwen-tiny", "full", 16),
        ("llava-siglip-qwen-tiny", "default", 15),  # transformers drops the first patch: there is no class token
    ],
)
def test_placeholders_are_as_many_as_the_tower_yields(preset: str, strategy: str, tokens: int) -> None:
    recipe = _recipe(_tree(preset, vision_feature_select_strategy=strategy))
    assert recipe.family.pictures(recipe.config).tokens == tokens
    model = recipe.build_model()
    features = model.model.get_image_features(pixel_values=torch.zeros(1, 3, 32, 32)).pooler_output
    assert [tuple(image.shape) for image in features] == [(tokens, 96)]


def test_pixel_statistics_are_those_of_the_directory_else_of_the_tower(tmp_path: Path) -> None:
    recipes = [_recipe(_tree(preset)) for preset in ("llava-tiny", "llava-siglip-qwen-tiny")]
    pictures = [recipe.family.pictures(recipe.config) for recipe in recipes]
    clip, siglip = ((one.mean, one.std) for one in pictures)
    assert build.pixel_statistics(clip, None)[0] == pytest.approx((0.4815, 0.4578, 0.4082), abs=1e-4)
    assert build.pixel_statistics(siglip, str(tmp_path)) == ((0.5,) * 3, (0.5,) * 3)
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 3]}')
    assert build.pixel_statistics(clip, str(tmp_path)) == ((0.1, 0.2, 0.3), (1, 2, 3))


def test_sequences_are_padded_to_what_the_preferred_tp_divides() -> None:
    recipe = _recipe(_tree(), layout__tp=3)
    batch = recipe.collate([Sample("a", None, "b", "c")], [1])
    assert batch.arrays["input_ids"].shape[1] % 24 == 0
    assert isinstance(recipe.config.vision_config, CLIPVisionConfig)
