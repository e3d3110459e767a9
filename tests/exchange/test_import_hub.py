"""From a Hugging Face directory to the first checkpoint of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.exchange.conftest import job_in, save, state_of
from tests.support.ranks import RankPool
from tests.support.vlm import engine_of

from planaria.config import JobConfig
from planaria.control.resume import Resume
from planaria.engine.native import NativeEngine
from planaria.exchange.bring import bring
from planaria.exchange.contents import Contents
from planaria.exchange.errors import ExchangeError
from planaria.exchange.exporting import export
from planaria.exchange.hub import HubSource
from planaria.exchange.importing import bring_in
from planaria.exchange.matching import match
from planaria.layout import Layout
from planaria.models.vlm import VLMRecipe
from planaria.runtime.groups import Groups
from planaria.state.errors import CheckpointError
from planaria.state.vault import Vault


def exported(tmp_path: Path, preset: str = "llava-tiny", **options: Any) -> tuple[JobConfig, dict[str, torch.Tensor]]:
    job = job_in(tmp_path, preset, name="first")
    state = state_of(job)
    with Vault(save(job, state)).at(10) as checkpoint:
        export(checkpoint, Contents(job), tmp_path / "hf", **options)
    return job, state


@pytest.mark.parametrize("max_file_bytes", [10**9, 100_000])
def test_import_of_an_export_is_the_same_to_the_bit(preset: str, tmp_path: Path, max_file_bytes: int) -> None:
    _, state = exported(tmp_path, preset, max_file_bytes=max_file_bytes)
    job = job_in(tmp_path, preset)
    done = bring(tmp_path / "hf", job)
    assert (done.step, done.updates, done.notes) == (0, 0, ())
    with Vault(tmp_path / "run").at(0) as checkpoint:
        assert checkpoint.verify() == []
        names = {name for name in state if name.startswith("model/")}
        assert set(checkpoint.tensors) == names | {"optim/updates"}
        for name in names:
            assert torch.equal(checkpoint.read(name), state[name]), name
        assert checkpoint.meta["imported"] == {"from": str(tmp_path / "hf")}
    again = tmp_path / "again"
    with Vault(tmp_path / "run").at(0) as checkpoint:
        export(checkpoint, Contents(job), again, max_file_bytes=max_file_bytes)
    for file in sorted((tmp_path / "hf").iterdir()):
        assert (again / file.name).read_bytes() == file.read_bytes(), file.name


def test_shards_are_bounded(tmp_path: Path) -> None:
    exported(tmp_path)
    job, source = job_in(tmp_path), HubSource(tmp_path / "hf")
    contents = Contents(job)
    vault = Vault(tmp_path / "run")
    bring_in(source, match(source.shapes(), contents, "hf"), contents, vault, 3, 0, batch_bytes=300_000)
    with vault.at(3) as checkpoint:
        sizes = [sum(item.nbytes for item in slices) for slices in checkpoint.index.by_file().values()]
        assert len(sizes) > 3 and max(sizes) <= 300_000
        assert set(checkpoint.tensors) == set(contents.expected())
        assert not any(checkpoint.read(name).any() for name in checkpoint.tensors if name.startswith("optim/"))


def _loaded(groups: Groups, job: JobConfig, step: int) -> dict[str, Any]:
    engine: NativeEngine = engine_of(groups, VLMRecipe(job), job)
    with Vault(Path(job.storage) / job.name).at(step) as checkpoint:
        engine.load(checkpoint)
        same = all(
            torch.equal(shard.local(), checkpoint.read(f"model/{shard.name}", shard.box)) for shard in engine.shards
        )
    return {"step": engine.step_done, "updates": engine.optimizer.updates, "same": same, "expected": engine.expected()}


def test_training_goes_on_from_it_on_any_layout(pool: RankPool, preset: str, tmp_path: Path) -> None:
    exported(tmp_path, preset)
    job = job_in(tmp_path, preset)
    bring(tmp_path / "hf", job)
    for layout in (Layout(), Layout(dp_shard=2, tp=2)):
        for got in pool.run(layout, _loaded, job, 0):
            expected = got.pop("expected")
            assert got == {"step": 0, "updates": 0, "same": True}
            assert expected == Contents(job).expected()


def _expected(groups: Groups, job: JobConfig) -> dict[str, tuple[int, ...]]:
    return engine_of(groups, VLMRecipe(job), job).expected()


@pytest.mark.parametrize(
    "changes",
    [
        {"model__freeze": ["vision"]},
        {"model__freeze": ["language", "projector"]},
        {"optim": {"name": "sgd"}},
        {"optim": {"name": "sgd", "momentum": 0.5}},
    ],
)
def test_what_a_checkpoint_holds_is_what_an_engine_says(
    pool: RankPool, preset: str, tmp_path: Path, changes: dict[str, Any]
) -> None:
    job = job_in(tmp_path, preset, **changes)
    assert pool.run(Layout(), _expected, job) == [Contents(job).expected()]


def test_the_run_takes_it_for_its_own(tmp_path: Path) -> None:
    exported(tmp_path)
    job = job_in(tmp_path)
    bring(tmp_path / "hf", job)
    told: list[Any] = []
    resume = Resume(Vault(tmp_path / "run"), job, "run", lambda *args, **kwargs: told.append((args, kwargs)))
    assert resume.step() == 0
    assert told == [(("resumed", "going on from the checkpoint of step 0"), {"step": 0, "changed": []})]


def test_in_another_precision(tmp_path: Path) -> None:
    _, state = exported(tmp_path, dtype="bf16")
    job = job_in(tmp_path, train__precision="fp64")
    bring(tmp_path / "hf", job)
    with Vault(tmp_path / "run").at(0) as checkpoint:
        for name in checkpoint.tensors:
            if name.startswith("model/"):
                assert torch.equal(checkpoint.read(name), state[name].bfloat16().double())


def test_a_run_that_has_checkpoints_is_left_alone(tmp_path: Path) -> None:
    job, _ = exported(tmp_path)
    with pytest.raises(ExchangeError, match=r"first/checkpoints/step-00000010: the run has checkpoints already"):
        bring(tmp_path / "hf", job)


def test_everything_that_does_not_fit_is_listed(tmp_path: Path) -> None:
    exported(tmp_path)
    file = tmp_path / "hf/model.safetensors"
    tensors = load_file(file)
    for key in [key for key in tensors if "layers.1.mlp" in key and key.startswith("language_model")]:
        del tensors[key]
    tensors["adapter.weight"] = torch.ones(2)
    tensors["language_model.lm_head.weight"] = torch.ones(500, 96)
    tensors["language_model.model.rotary_emb.inv_freq"] = torch.ones(12)  # older versions saved it
    save_file(tensors, file)
    job = job_in(tmp_path)
    with pytest.raises(ExchangeError) as caught:
        bring(tmp_path / "hf", job)
    text = str(caught.value)
    assert text.splitlines()[0] == f"{tmp_path / 'hf'}: does not fit the job's model"
    assert "missing: 3 of 89 tensors (model.language_model.layers.1.mlp.gate_proj.weight, " in text
    assert "no place for: 1 tensors (adapter.weight)" in text
    assert "another shape: 1 tensors (language_model.lm_head.weight [500, 96] for [384, 96])" in text
    assert "--ignore PATTERN" in text and "--fresh-optimizer" not in text
    assert not (tmp_path / "run").exists()
    tensors = load_file(file) | {"language_model.lm_head.weight": torch.ones(384, 96)}
    for name in ("gate", "up", "down"):
        shape = (96, 256) if name == "down" else (256, 96)
        tensors[f"language_model.model.layers.1.mlp.{name}_proj.weight"] = torch.ones(shape)
    save_file(tensors, file)
    assert bring(tmp_path / "hf", job, ignore=["adapter.*"]).tensors == 90


def test_weights_of_the_same_shapes_that_mean_another_model(tmp_path: Path) -> None:
    exported(tmp_path)
    path = tmp_path / "hf/config.json"
    tree = json.loads(path.read_text())
    tree["text_config"]["rms_norm_eps"] = 0.1
    tree["vision_feature_layer"] = -1
    path.write_text(json.dumps(tree))
    with pytest.raises(ExchangeError) as caught:
        bring(tmp_path / "hf", job_in(tmp_path))
    assert "text_config.rms_norm_eps: 0.1 there, 1e-05 in the job" in str(caught.value)
    assert "vision_feature_layer: -1 there, -2 in the job" in str(caught.value)
    bring(tmp_path / "hf", job_in(tmp_path, model={"path": str(tmp_path / "hf")}))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "no such folder"),
        ((), "holds neither model.safetensors"),
        (("pytorch_model.bin",), "its weights are pickles"),
        (("manifest.json",), "is Planaria's own"),
        (("model.safetensors",), "model.safetensors: cannot be read"),
        (("model.safetensors.index.json",), "index.json: damaged"),
    ],
)
def test_what_is_no_source(tmp_path: Path, files: tuple[str, ...] | None, message: str) -> None:
    folder = tmp_path / "source"
    if files is not None:
        folder.mkdir()
        for name in files:
            (folder / name).write_bytes(b"x")
    with pytest.raises(ExchangeError, match=message):
        bring(folder, job_in(tmp_path))
    assert not (tmp_path / "run").exists()


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported(tmp_path)
    storage = type(Vault(tmp_path / "run")._storage)
    write = storage.write

    def full(self: Any, folder: str, name: str, chunks: Any) -> int:
        if name == "manifest.json":
            raise OSError(28, "No space left on device")
        return write(self, folder, name, chunks)

    monkeypatch.setattr(storage, "write", full)
    with pytest.raises(CheckpointError, match="no space"):
        bring(tmp_path / "hf", job_in(tmp_path))
    assert list((tmp_path / "run/checkpoints").iterdir()) == []


@pytest.mark.parametrize("naming", ["older", "module"])
def test_other_names_that_transformers_knows(preset: str, tmp_path: Path, naming: str) -> None:
    """Those of the models on the hub that were saved years ago, and those of the module itself."""
    _, state = exported(tmp_path, preset)
    file = tmp_path / "hf/model.safetensors"
    if naming == "older":
        tensors = load_file(file)
        tensors = {key.replace("vision_tower.", "vision_tower.vision_model."): value for key, value in tensors.items()}
    else:
        tensors = {name.removeprefix("model/"): value for name, value in state.items() if name.startswith("model/")}
    save_file(tensors, file)
    bring(tmp_path / "hf", job_in(tmp_path, preset))
    with Vault(tmp_path / "run").at(0) as checkpoint:
        for name in checkpoint.tensors:
            if name.startswith("model/"):
                assert torch.equal(checkpoint.read(name), state[name]), name
