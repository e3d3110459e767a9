"""``planaria evaluate``: a real checkpoint, scored and decoded in this process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from planaria.cli import app
from planaria.commands.evaluate import greedy, locate, lone_mesh, score
from planaria.config import JobConfig, parse
from planaria.data.builder import BatchBuilder
from planaria.engine.batches import to_device
from planaria.engine.initial import InitialState
from planaria.engine.native import NativeEngine
from planaria.layout import Layout
from planaria.models.choose import job_recipe
from planaria.models.vlm import VLMRecipe
from planaria.state.vault import Vault

CPU = torch.device("cpu")


def job_in(folder) -> JobConfig:
    return parse(
        {
            "name": "small",
            "model": {"preset": "llava-tiny"},
            "data": {"scenes": {"val_samples": 24, "text_only_fraction": 0.4}},
            "train": {"steps": 4, "global_batch": 4, "micro_batch": 8},
            "evaluate": {"samples": 24},
            "storage": str(folder),
        }
    )


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    job = job_in(tmp_path_factory.mktemp("runs"))
    recipe = VLMRecipe(job)
    folder = f"{job.storage}/{job.name}"
    with lone_mesh(CPU) as mesh:
        engine = NativeEngine(recipe, job, Layout(), mesh, CPU)
        engine.load(InitialState(recipe, job))
        builder = BatchBuilder(recipe.dataset("train"), recipe.collate, 0, 4, True)
        for step in range(2):
            batches = builder.build(step, 0, 4, 1).micro_batches
            engine.train_step(batches, sum(batch.targets for batch in batches))
        writer = Vault(folder).writer(2, "t")
        slices = writer.write_shard(0, engine.pieces())
        writer.commit(slices, {"layout": "single", "job": job.model_dump(mode="json")}, expected=engine.expected())
    return folder


def test_a_run_directory_knows_its_job(run_dir):
    result = CliRunner().invoke(app, ["evaluate", run_dir, "--examples", "3"], env={"COLUMNS": "140"})
    assert result.exit_code == 0, result.stderr
    assert "small: checkpoint of step 2" in result.output
    assert "chance is" in result.output
    assert "prediction" in result.output
    assert not dist.is_initialized()


def test_the_step_is_named_or_an_error(run_dir):
    job, checkpoint = locate(run_dir, (), 2)
    checkpoint.close()
    assert job.name == "small"
    result = CliRunner().invoke(app, ["evaluate", run_dir, "--step", "7"])
    assert result.exit_code == 2
    assert "no checkpoint of step 7" in result.stderr


def test_scores_follow_the_samples_asked_for(run_dir):
    job, checkpoint = locate(run_dir, (), None)
    with checkpoint:
        scores, examples = score(job, checkpoint, 2)
    assert scores["samples"] == 24
    assert 0 < scores["chance"] < 1
    assert len(examples) == 2


def test_greedy_decoding_agrees_with_scoring(run_dir):
    """A row counts as right if and only if decoding it token by token yields its answer; text-only rows included."""
    job, checkpoint = locate(run_dir, (), None)
    recipe = VLMRecipe(job)
    builder = BatchBuilder(recipe.dataset("val"), recipe.collate, 0, 4, False)
    with checkpoint, lone_mesh(CPU) as mesh:
        engine = NativeEngine(recipe, job, Layout(), mesh, CPU)
        engine.load(checkpoint)
        for index in range(6):
            batch = builder.eval_batch(index, index + 1, 1).batch
            said = greedy(engine, batch, recipe.codec.eos_id, recipe.codec.pad_id)
            labels = batch.arrays["labels"][0]
            start = int((labels != -100).nonzero()[0][0])
            wanted = [int(token) for token in labels[labels != -100]]
            names = ("input_ids", "attention_mask", "pixel_values")
            tensors = to_device(batch, CPU)
            out = engine.model(**{name: tensors[name] for name in names}, use_cache=False)
            first = int(out.logits[0, start - 1].argmax())
            assert (said[0] if said else recipe.codec.eos_id) == first
            right = [*said, recipe.codec.eos_id][: len(wanted)] == wanted
            assert right == bool(engine.score(builder.eval_batch(index, index + 1, 1).batch)[0] == 1)


def test_a_dual_encoder_is_scored_by_retrieval(tmp_path):
    tree = job_in(tmp_path).model_dump(mode="json")
    tree["model"]["preset"] = "siglip-tiny"
    tree["data"]["scenes"] |= {"caption_fraction": 1.0, "text_only_fraction": 0.0}
    job = parse(tree)
    recipe = job_recipe(job)
    with lone_mesh(CPU) as mesh:
        engine = NativeEngine(recipe, job, Layout(), mesh, CPU)
        engine.load(InitialState(recipe, job))
        builder = BatchBuilder(recipe.dataset("train"), recipe.collate, 0, 4, True)
        batches = builder.build(0, 0, 4, 2).micro_batches
        engine.train_step(batches, 4)
        writer = Vault(tmp_path / job.name).writer(1, "t")
        slices = writer.write_shard(0, engine.pieces())
        writer.commit(slices, {"layout": "single", "job": job.model_dump(mode="json")}, expected=engine.expected())
    result = CliRunner().invoke(app, ["evaluate", str(tmp_path / job.name), "--examples", "2"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.stderr
    assert "recall at 1 / 5 / 10 among 24 pairs: image to text" in result.output
    assert "scenes/val/0" in result.output and "scenes/val/1" in result.output
    assert "scenes/val/2" not in result.output
