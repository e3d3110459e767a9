"""Each family: how pictures enter, what is frozen, what a micro-batch's rows mean, names of its weights in files."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.vlm import vlm_job
from torch import Tensor, nn
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from planaria.config import ConfigError
from planaria.data.collate import IGNORE
from planaria.data.images import fit, normalise
from planaria.data.sample import Sample, Turn, conversation_sample
from planaria.engine.batches import to_device
from planaria.models.hub_names import HubNames
from planaria.models.presets import PRESETS
from planaria.models.pretrained import PretrainedState
from planaria.models.vlm import VLMRecipe
from planaria.parity.table import DUAL
from planaria.recipe import MicroBatch
from planaria.state.boxes import Box

DICE = np.random.default_rng(5)
PICTURES = [DICE.integers(0, 255, (32, 32, 3)).astype(np.uint8) for _ in range(2)]
SAMPLES = [
    Sample("a", PICTURES[0], "what?", "this"),
    Sample("b", None, "no picture?", "none at all"),
    Sample("c", PICTURES[1], "and?", "that"),
]


@pytest.fixture(params=[name for name in PRESETS if name not in DUAL], scope="module")
def trained(request: pytest.FixtureRequest) -> tuple[VLMRecipe, nn.Module]:
    """A recipe, and its model with weights that no fresh one has."""
    recipe = VLMRecipe(vlm_job(request.param))
    torch.manual_seed(7)
    model = recipe.build_model().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return recipe, model


def _tensors(batch: MicroBatch) -> dict[str, Tensor]:
    found = to_device(batch, torch.device("cpu"))
    return {name: t.double() if t.is_floating_point() else t for name, t in found.items()}


def test_conversations_with_several_pictures(trained: tuple[VLMRecipe, nn.Module]) -> None:
    """A row means the same beside others; an answer depends on the pictures before it, and on nothing behind it."""
    recipe, model = trained
    turns = (Turn(("", " or ", "?"), "one"), Turn(("And ", "?"), "two"))
    black, (first, second) = np.zeros_like(PICTURES[0]), PICTURES

    def loss(*samples: Sample, of_first_answer: bool = False) -> float:
        batch = _tensors(recipe.collate(samples, [1] * len(samples)))
        if of_first_answer:
            labels = batch["labels"].clone()
            learned = (labels[0] != IGNORE).nonzero()[:, 0]
            labels[0, learned[4] :] = IGNORE  # "one" and its end
            batch["labels"] = labels
        with torch.no_grad():
            return recipe.loss(model, batch).item()

    whole = conversation_sample("k", [first, second, black], turns)
    assert loss(whole, *SAMPLES) == pytest.approx(loss(whole) + sum(loss(sample) for sample in SAMPLES))
    for images in ([black, second, black], [first, black, black], [first, second, second]):
        assert loss(conversation_sample("k", images, turns)) != pytest.approx(loss(whole), rel=1e-7)
    begun = conversation_sample("k", [first, second], turns[:1])
    assert loss(whole, of_first_answer=True) == pytest.approx(loss(begun))


def test_a_sample_means_the_same_alone_and_among_others(trained: tuple[VLMRecipe, nn.Module]) -> None:
    """Also one without a picture: a rank may get it alone, and must then compute what it would among others."""
    recipe, model = trained
    with torch.no_grad():
        alone = [recipe.loss(model, _tensors(recipe.collate([sample], [1]))).item() for sample in SAMPLES]
        assert recipe.loss(model, _tensors(recipe.collate(SAMPLES, [1, 1, 1]))).item() == pytest.approx(sum(alone))
        uncounted = recipe.loss(model, _tensors(recipe.collate(SAMPLES, [1, 0, 1]))).item()
    assert uncounted == pytest.approx(alone[0] + alone[2]) and alone[1] > 1


def test_pictures_matter(trained: tuple[VLMRecipe, nn.Module]) -> None:
    recipe, model = trained
    other = Sample("a", PICTURES[1], "what?", "this")
    with torch.no_grad():
        losses = [recipe.loss(model, _tensors(recipe.collate([one], [1]))).item() for one in (SAMPLES[0], other)]
    assert losses[0] != pytest.approx(losses[1], rel=1e-6)


def test_every_parameter_has_a_part_and_frozen_parts_do_not_train(trained: tuple[VLMRecipe, nn.Module]) -> None:
    recipe, _ = trained
    assert recipe.job.model is not None
    with torch.device("meta"):
        whole = recipe.build_model()
        model = recipe.job.model.model_copy(update={"freeze": ("vision", "projector")})
        frozen = VLMRecipe(recipe.job.model_copy(update={"model": model})).build_model()
    parts = {name: recipe.family.part_of(name) for name, _ in whole.named_parameters()}
    assert set(parts.values()) == {"vision", "projector", "language"}
    for name, part in parts.items():
        assert (part == "language") == (".language_model." in name or ".text_model." in name or "lm_head" in name), name
        assert frozen.get_parameter(name).requires_grad == (part == "language"), name
        assert whole.get_parameter(name).requires_grad or part == "vision"  # the unused end of a tower
        assert recipe.lr_scale(name) == 1.0


def test_weights_go_through_a_hugging_face_directory(trained: tuple[VLMRecipe, Any], tmp_path: Path) -> None:
    _, model = trained
    model.save_pretrained(tmp_path)
    state = PretrainedState(str(tmp_path), model)
    for name, parameter in model.named_parameters():
        assert torch.equal(state.read(f"model/{name}", Box.whole(parameter.shape)), parameter), name
    names = HubNames(model)
    assert names.to_hub() == {name: state.source(name) for name, _ in model.named_parameters()}


def test_patches_are_those_of_the_family_s_own_processor() -> None:
    recipe = VLMRecipe(vlm_job("qwen2-vl-tiny"))
    arrays = recipe.collate([SAMPLES[0], SAMPLES[2]], [1, 1]).arrays
    pictures = recipe.family.pictures(recipe.config)
    own = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, do_resize=False, do_rescale=False, do_normalize=False
    )
    pixels = [normalise(fit(picture, pictures.side)[None], pictures.mean, pictures.std)[0] for picture in PICTURES]
    for index, picture in enumerate(pixels):
        expected = own(picture, input_data_format="channels_first", return_tensors="np")
        assert np.array_equal(arrays["pixel_values"][64 * index : 64 * (index + 1)], expected["pixel_values"])
        assert np.array_equal(arrays["image_grid_thw"][index : index + 1], expected["image_grid_thw"])
    assert arrays["mm_token_type_ids"].sum() == 2 * pictures.tokens


def test_a_picture_that_is_zero_everywhere_is_no_padding() -> None:
    recipe = VLMRecipe(vlm_job("smolvlm-tiny"))
    pictures = recipe.family.pictures(recipe.config)
    packed = pictures.pack(
        np.zeros((2, 3, 32, 32), dtype=np.float32), [True] * 2, np.ones((2, 4), dtype=np.int64), np.ones((2, 4), bool)
    )
    features = recipe.build_model().model.get_image_features(  # type: ignore[union-attr,operator]
        torch.from_numpy(packed["pixel_values"]), torch.from_numpy(packed["pixel_attention_mask"])
    )
    assert [tuple(picture.shape) for picture in features.pooler_output] == [(pictures.tokens, 96)] * 2


# What differs under tensor parallelism


def test_sequences_are_split_where_a_family_allows_it() -> None:
    stacks = {}
    for preset in ("llava-tiny", "smolvlm-tiny", "qwen2.5-vl-tiny", "qwen3-vl-tiny", "mllama-tiny"):
        recipe = VLMRecipe(vlm_job(preset))
        with torch.device("meta"):
            stacks[preset] = recipe.sharding(recipe.build_model()).sequence_parallel
    first = "model.language_model.layers.0", "model.language_model.norm"
    assert stacks["llava-tiny"] == stacks["qwen2.5-vl-tiny"] == stacks["qwen3-vl-tiny"] == (first,)
    assert stacks["smolvlm-tiny"] == (("model.text_model.layers.0", "model.text_model.norm"),)
    assert stacks["mllama-tiny"] == ()


def test_layers_that_transformers_does_not_mark_are_units_too() -> None:
    recipe = VLMRecipe(vlm_job("mllama-tiny"))
    with torch.device("meta"):
        units = recipe.sharding(recipe.build_model()).units
    assert (
        "model.vision_model.transformer.layers.0" in units and "model.vision_model.global_transformer.layers.0" in units
    )


# Configs that cannot be


@pytest.mark.parametrize(
    ("preset", "path", "value", "message"),
    [
        (
            "smolvlm-tiny",
            "vision_config.image_size",
            20,
            "vision_config.image_size: 20 is not a multiple of 8",
        ),
        (
            "qwen2-vl-tiny",
            "vision_config.image_size",
            36,
            "image_size: 36 is not a multiple of 8, patch_size",
        ),
        ("qwen3-vl-tiny", "vision_config.out_hidden_size", 80, "yields 80 features, but text_config.hidden_size is 96"),
        (
            "mllama-tiny",
            "vision_config.image_size",
            30,
            "image_size: 30 is not a multiple of patch_size 8",
        ),
        ("mllama-tiny", "vision_config.vision_output_dim", 64, "vision_output_dim: 64, but hidden_size times one more"),
        ("mllama-tiny", "vision_config.supported_aspect_ratios", [[1, 2], [2, 1]], r"lacks \[1, 1\]"),
        (
            "llava-siglip-mistral-tiny",
            "text_config.model_type",
            "gpt2",
            "'gpt2' is not supported; use one of llama",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_name(preset: str, path: str, value: Any, message: str) -> None:
    tree = copy.deepcopy(PRESETS[preset])
    section, _, key = path.partition(".")
    tree[section][key] = value
    with pytest.raises(ConfigError, match=message):
        _ = VLMRecipe(vlm_job(model={"config": tree})).config


_TOWER, _DECODER = PRESETS["llava-siglip-qwen-tiny"]["vision_config"], PRESETS["llava-siglip-qwen-tiny"]["text_config"]


def test_a_class_without_a_family_goes_by_the_generic_rules() -> None:
    tree = {"model_type": "paligemma", "vision_config": _TOWER | {"projection_dim": 96, "vision_use_head": False}}
    tree["text_config"] = {"model_type": "gemma", "num_key_value_heads": 2, "head_dim": 24} | {
        key: _DECODER[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    }
    recipe = VLMRecipe(vlm_job(model={"config": tree | {"projection_dim": 96}}))
    assert recipe.family.vision == ("model.vision_tower",) and recipe.family.pictures(recipe.config).tokens == 16
    model = recipe.build_model()
    assert len(recipe.sharding(model).units) == 6
    loss = recipe.loss(
        model,
        {k: v.float() if v.is_floating_point() else v for k, v in _tensors(recipe.collate(SAMPLES, [1, 1, 1])).items()},
    )
    assert loss.item() > 0


def test_what_the_generic_rules_do_not_cover_is_one_list() -> None:
    tree = {"model_type": "llava_next", "vision_config": _TOWER, "text_config": _DECODER}
    with pytest.raises(ConfigError) as caught:
        _ = VLMRecipe(vlm_job(model={"config": tree})).config
    message = str(caught.value)
    assert "'llava_next' has no family of its own (llava, smolvlm," in message and "get_image_features fails" in message
    with pytest.raises(ConfigError) as caught:
        _ = VLMRecipe(vlm_job(model={"config": {"model_type": "blip-2"}})).config
    assert "no projector under any of" in str(caught.value) and "; " in str(caught.value)
