"""CLIP and SigLIP: configs, initial logits, weights of files in and out, pairs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tests.exchange.conftest import save
from tests.support.dual import dual_job
from tests.support.vlm import vlm_job
from transformers import AutoModel, CLIPModel, SiglipModel

from planaria.config import ConfigError
from planaria.data.sample import Sample
from planaria.data.tokens import load_tokenizer
from planaria.engine.initial import build, first_state
from planaria.exchange.contents import Contents
from planaria.exchange.exporting import export
from planaria.models.choose import directory_config, job_recipe
from planaria.models.dual import DualEncoderRecipe
from planaria.models.vlm import VLMRecipe
from planaria.recipe import BoundedRecipe, ContrastiveRecipe, MetaRecipe, ScoredRecipe, is_scored
from planaria.state.boxes import Box
from planaria.state.vault import Vault

CLASSES = {"clip-tiny": CLIPModel, "siglip-tiny": SiglipModel}
TEXT = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION = TEXT | {"image_size": 32, "patch_size": 16}


def _tree(kind: str, **text: Any) -> dict[str, Any]:
    return {"model_type": kind, "text_config": TEXT | text, "vision_config": VISION}


def test_the_model_type_chooses_the_recipe() -> None:
    for preset in CLASSES:
        recipe = job_recipe(dual_job(preset))
        assert isinstance(recipe, DualEncoderRecipe) and isinstance(recipe, MetaRecipe)
        assert isinstance(recipe, ContrastiveRecipe) and isinstance(recipe, BoundedRecipe)
        assert is_scored(recipe) and not isinstance(recipe, ScoredRecipe)
    other = job_recipe(vlm_job())
    assert type(other) is VLMRecipe and not isinstance(other, ContrastiveRecipe)


@pytest.mark.parametrize(
    ("preset", "scale", "bias"), [("clip-tiny", 2.6592, None), ("siglip-tiny", math.log(10), -10.0)]
)
def test_logits_start_as_the_papers_say(preset: str, scale: float, bias: float | None) -> None:
    job = dual_job(preset)
    state = first_state(job_recipe(job), job)
    assert state.read("model/logit_scale", Box.whole((1,))).tolist() == pytest.approx([scale])
    if bias is not None:
        assert state.read("model/logit_bias", Box.whole((1,))).tolist() == [bias]


@pytest.mark.parametrize("preset", list(CLASSES))
def test_weights_come_in_and_go_out_as_the_class_has_them(preset: str, tmp_path: Path) -> None:
    recipe = DualEncoderRecipe(dual_job(preset))
    torch.manual_seed(5)
    theirs = CLASSES[preset](recipe.config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    theirs.save_pretrained(tmp_path / "in")
    job = dual_job(model={"path": str(tmp_path / "in")}, storage=str(tmp_path), train__precision="fp32")
    contents = Contents(job)
    assert contents.parameters["logit_scale"] == (1,)
    read = first_state(contents.recipe, job)
    state = {f"model/{n}": read.read(f"model/{n}", Box.whole(s)) for n, s in contents.parameters.items()}
    assert state["model/logit_scale"].tolist() == theirs.logit_scale.detach().reshape(1).tolist()
    full = {name: state.get(name, torch.zeros(shape)) for name, shape in contents.expected().items()}
    with Vault(save(job, full)).at(10) as checkpoint:
        export(checkpoint, contents, tmp_path / "out")
    with safe_open(str(tmp_path / "out/model.safetensors"), framework="pt") as file:
        assert tuple(file.get_slice("logit_scale").get_shape()) == tuple(theirs.logit_scale.shape)
    assert not (tmp_path / "out/generation_config.json").exists()
    back, info = AutoModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(back) is CLASSES[preset] and not any(info.values())
    for name, parameter in theirs.named_parameters():
        assert torch.equal(back.get_parameter(name), parameter), name
    assert directory_config(str(tmp_path / "out")).model_type == theirs.config.model_type


def test_classes_are_untouched() -> None:
    config = DualEncoderRecipe(dual_job()).config
    network = build(DualEncoderRecipe(dual_job()), dual_job())
    assert type(network) is CLIPModel and network.logit_scale.shape == (1,)
    assert CLIPModel(config).logit_scale.shape == ()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"data__scenes": {"caption_fraction": 0.5}}, "caption_fraction=1"),
        ({"data__scenes": {"caption_fraction": 1.0, "text_only_fraction": 0.1}}, "text_only_fraction=0"),
        ({"layout__cp": 2}, "set both to 1"),
        ({"engine": {"name": "deepspeed"}, "train__precision": "fp32"}, "set engine.name=native"),
        ({"model": {"preset": "clip-tiny", "lora": {}}}, "trains without adapters"),
        ({"model": {"config": _tree("clip", eos_token_id=5)}}, "pool at the wrong position"),
        ({"model": {"config": _tree("clip", eos_token_id=2)}}, "pool at the largest id"),
        ({"model": {"config": _tree("clip", vocab_size=100)}}, "data.tokenizer: it has"),
        ({"model": {"config": _tree("siglip", projection_size=8)}}, "projection_size"),
        ({"model": {"config": _tree("siglip"), "freeze": ["projector"]}}, "siglip has no projector"),
        (
            {"model": {"config": _tree("clip") | {"vision_config": VISION | {"patch_size": 5}}}},
            "multiple of patch_size",
        ),
        ({"model": {"config": _tree("clip") | {"text_config": {"hidden_size": "x"}}}}, "transformers refuses it"),
    ],
)
def test_what_would_go_wrong_is_refused(override: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DualEncoderRecipe(dual_job(**override)).build_model()


def test_parts_are_frozen() -> None:
    job = dual_job(model={"preset": "clip-tiny", "freeze": ["vision"]})
    trained = {name for name, p in DualEncoderRecipe(job).build_model().named_parameters() if p.requires_grad}
    assert "logit_scale" in trained and "visual_projection.weight" in trained
    assert not any(name.startswith("vision_model.") for name in trained)


# Pairs


def _collate(preset: str, captions: list[str], weights: list[int]) -> Any:
    picture = np.zeros((32, 32, 3), dtype=np.uint8)
    samples = [Sample(str(place), picture, "", caption) for place, caption in enumerate(captions)]
    return DualEncoderRecipe(dual_job(preset, data__max_length=20)).collate(samples, weights)


def test_a_caption_ends_where_clip_pools_however_long_it_is() -> None:
    codec = load_tokenizer("bytes")
    batch = _collate("clip-tiny", ["red", "a very long caption of a thing"], [1, 0])
    ids = batch.arrays["input_ids"]
    assert ids.shape == (2, 20)
    assert ids[0, 3] == codec.eos_id and (ids[0, 4:] == codec.pad_id).all()
    assert ids[1, 19] == codec.eos_id and codec.decode(ids[1, :19].tolist()) == "a very long caption"
    assert batch.targets == 1 and batch.tokens == 4
    assert batch.arrays["weights"].tolist() == [1.0, 0.0]
    assert _collate("clip-tiny", ["red"], [1]).arrays["input_ids"].shape == (1, 8)


def test_siglip_sees_the_same_padding_in_every_company() -> None:
    alone = _collate("siglip-tiny", ["red"], [1]).arrays["input_ids"]
    beside = _collate("siglip-tiny", ["red", "a much longer one"], [1, 1]).arrays["input_ids"]
    assert alone.shape == (1, 20)
    assert (alone[0] == beside[0]).all()


def test_a_sample_without_a_picture_is_no_pair() -> None:
    with pytest.raises(ValueError, match="without a picture make no pairs: a"):
        DualEncoderRecipe(dual_job()).collate([Sample("a", None, "", "red")], [1])


def test_a_legacy_directory_pools_at_the_largest_id(tmp_path: Path) -> None:
    """The id of the first CLIP configs is right if the tokenizer's own end of sequence is its last id."""
    recipe = DualEncoderRecipe(dual_job())
    CLIPModel(recipe.config).save_pretrained(tmp_path)
    tree = json.loads((tmp_path / "config.json").read_text())
    tree["text_config"]["eos_token_id"] = 2
    (tmp_path / "config.json").write_text(json.dumps(tree))
    job = dual_job(model={"path": str(tmp_path)})
    legacy = DualEncoderRecipe(job)
    with pytest.raises(ConfigError, match="pool at the largest id"):
        _ = legacy.config
    codec = recipe.codec
    last = type(codec)(codec.tokenizer, codec.vocab_size - 1, codec.pad_id, codec.image_id, codec.vocab_size)
    legacy = DualEncoderRecipe(job)
    legacy.__dict__["codec"] = last
    assert legacy.config.text_config.eos_token_id == 2
