"""Weights of a Hugging Face directory, on any layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.ranks import RankPool
from tests.support.vlm import batches, engine_of, vlm_job
from torch import Tensor
from transformers import LlavaForConditionalGeneration

from planaria.config import ConfigError, JobConfig
from planaria.engine.batches import to_device
from planaria.engine.collectives import gather_features
from planaria.engine.initial import first_state
from planaria.layout import Layout
from planaria.models.pretrained import PretrainedState
from planaria.models.vlm import VLMRecipe
from planaria.recipe import logits_part
from planaria.runtime.groups import Groups
from planaria.state.boxes import Box

PRESETS = ("llava-tiny", "llava-siglip-qwen-tiny")


@pytest.fixture(params=PRESETS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(7)
    model = VLMRecipe(vlm_job(request.param)).build_model()
    with torch.no_grad():
        for parameter in model.parameters():  # no value that a fresh model could have by chance
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(tmp_path)
    return tmp_path


def _job(folder: Path, **overrides: Any) -> JobConfig:
    return vlm_job(model={"path": str(folder)}, **overrides)


def _logits(groups: Groups, job: JobConfig) -> Tensor:
    recipe = VLMRecipe(job)
    engine = engine_of(groups, recipe, job)
    batch = engine._to_device(batches(recipe, job, 0, 0, 1)[0])
    batch.pop("labels")
    with torch.no_grad():
        logits = engine.model(**batch).logits
        part = logits_part(engine.model)
        return (logits if part.vocabulary is None else gather_features(logits, part.vocabulary)).clone()


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("fp64", 1e-10)])
def test_logits_are_those_of_from_pretrained(pool: RankPool, folder: Path, precision: str, tolerance: float) -> None:
    job = _job(folder, train__precision=precision)
    dtype = torch.float64 if precision == "fp64" else torch.float32
    own = LlavaForConditionalGeneration.from_pretrained(folder, dtype=dtype)
    batch = batches(VLMRecipe(job), job, 0, 0, 1)[0]
    inputs = {key: t for key, t in to_device(batch, torch.device("cpu"), dtype).items() if key != "labels"}
    with torch.no_grad():
        expected = own(**inputs).logits
    scale = expected.abs().max().item()
    for layout in (Layout(), Layout(dp_shard=2, tp=2)):
        for logits in pool.run(layout, _logits, job):
            assert (logits - expected).abs().max().item() < tolerance * scale


def _meta(folder: Path) -> Any:
    with torch.device("meta"):
        return VLMRecipe(_job(folder)).build_model()


def test_every_parameter_is_read_by_box_also_from_several_files(folder: Path, tmp_path: Path) -> None:
    own = LlavaForConditionalGeneration.from_pretrained(folder)
    own.save_pretrained(tmp_path / "split", max_shard_size="200KB")
    assert (tmp_path / "split" / "model.safetensors.index.json").exists()
    for path in (folder, tmp_path / "split"):
        state = first_state(VLMRecipe(_job(path)), _job(path))
        assert isinstance(state, PretrainedState) and state.step == 0
        for name, parameter in own.named_parameters():
            assert torch.equal(state.read(f"model/{name}", Box.whole(parameter.shape)), parameter), name
            rows = parameter.shape[0] // 2
            box = Box((rows, *(0,) * (parameter.dim() - 1)), (rows, *parameter.shape[1:]))
            assert torch.equal(state.read(f"model/{name}", box), parameter[rows : 2 * rows])
        empty = Box((4, *(0,) * (parameter.dim() - 1)), (0, *parameter.shape[1:]))
        assert state.read(f"model/{name}", empty).numel() == 0
    with pytest.raises(KeyError, match="holds no optim/exp_avg/x"):
        state.read("optim/exp_avg/x", Box.whole((1,)))


def _edit(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_what_is_missing_is_listed(folder: Path) -> None:
    _edit(folder, lambda tensors: [tensors.pop(key) for key in sorted(tensors) if "layers.1.mlp" in key])
    with pytest.raises(ConfigError, match=r"lacks \d+ tensors \(model\.\S+layers\.1\.mlp\..*is it complete"):
        PretrainedState(str(folder), _meta(folder))


def test_what_the_model_has_no_place_for_is_listed(folder: Path) -> None:
    _edit(folder, lambda tensors: tensors.update({"adapter.weight": torch.ones(2)}))
    with pytest.raises(ConfigError, match=r"holds 1 tensors \(adapter\.weight\), for which the model has no place"):
        PretrainedState(str(folder), _meta(folder))


def test_buffers_that_older_versions_saved_are_passed_over(folder: Path) -> None:
    stored = {"vision_tower.vision_model.embeddings.position_ids": torch.arange(17)[None]}
    stored["language_model.model.rotary_emb.inv_freq"] = torch.ones(12)
    _edit(folder, lambda tensors: tensors.update(stored))
    PretrainedState(str(folder), _meta(folder))


def test_a_tensor_of_another_shape_is_named(folder: Path) -> None:
    def widen(tensors: dict[str, Tensor]) -> None:
        key = next(key for key in tensors if "embed_tokens" in key)
        tensors[key] = torch.zeros(500, 96)

    _edit(folder, widen)
    with pytest.raises(ConfigError, match=r"embed_tokens.* \[500, 96\], but config.json makes it \[384, 96\]"):
        PretrainedState(str(folder), _meta(folder))


def test_damaged_and_absent_files_are_named(folder: Path) -> None:
    meta = _meta(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        PretrainedState(str(folder), meta)
    file.unlink()
    with pytest.raises(ConfigError, match=r"holds neither model\.safetensors nor model\.safetensors\.index\.json"):
        PretrainedState(str(folder), meta)
    index = folder / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(ConfigError, match=r"index\.json is damaged"):
        PretrainedState(str(folder), meta)
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(ConfigError, match=r"model-1\.safetensors cannot be read"):
        PretrainedState(str(folder), meta)
