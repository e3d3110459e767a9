"""``planaria checkpoint show | verify | export | import`` on the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from tests.exchange.conftest import job_in, overwrite, save, state_of
from transformers import LlavaForConditionalGeneration
from typer.testing import CliRunner

from planaria.cli import app
from planaria.config import JobConfig
from planaria.state.vault import Vault


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("NO_COLOR", "1")
    return lambda *arguments: CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])


@pytest.fixture
def job(tmp_path: Path) -> JobConfig:
    return job_in(tmp_path)


@pytest.fixture
def run(job: JobConfig) -> Path:
    """A run with checkpoints of steps 10 and 20."""
    save(job, state_of(job, 1), step=10)
    return save(job, state_of(job, 2), step=20)


def job_file(job: JobConfig, path: Path, **changes: Any) -> Path:
    path.write_text(yaml.safe_dump(job.model_dump(mode="json") | changes))
    return path


def shard(run: Path, step: int, number: int) -> Path:
    return run / f"checkpoints/step-{step:08d}/shard-{number:05d}.safetensors"


def damage(run: Path, step: int, *names: str) -> None:
    with Vault(run).at(step) as checkpoint:
        items = [checkpoint.index.tensors[name][0] for name in names]
    for item in items:
        overwrite(shard(run, step, 0).with_name(item.file), item.key)


# Show


def test_show(cli: Any, run: Path) -> None:
    result = cli("show", run, "--tensor", "lm_head")
    assert result.exit_code == 0, result.stderr
    lines = [" ".join(line.replace("|", " ").split()) for line in result.output.splitlines()]
    assert "step 20, layout dp_shard2, job run" in lines
    assert "model/lm_head.weight 384x96 F32 2 147k" in lines
    assert "optim/exp_avg_sq/lm_head.weight 384x96 F32 2 147k" in lines
    assert sum("lm_head" in line for line in lines) == 3
    assert any(line.startswith("model 89 ") for line in lines)
    assert any(line.startswith("shard-00001.safetensors ") for line in lines)
    plain = CliRunner(charset="ascii").invoke(app, ["checkpoint", "show", str(run)])
    assert plain.exit_code == 0 and "model/lm_head.weight" in plain.output


def test_show_as_json(cli: Any, run: Path, job: JobConfig) -> None:
    result = cli("show", run, "--step", 10, "--json", "--tensor", "optim/exp_avg/*norm*")
    assert result.exit_code == 0, result.stderr
    tree = json.loads(result.output)
    assert (tree["step"], tree["meta"]["layout"]) == (10, "dp_shard2")
    assert tree["meta"]["job"] == job.model_dump(mode="json")
    assert {row["name"].split("/")[1] for row in tree["tensors"]} == {"exp_avg"}
    row = next(row for row in tree["tensors"] if row["name"].endswith("language_model.norm.weight"))
    assert row == {"name": row["name"], "shape": [96], "dtype": "F32", "slices": 2, "bytes": 384}
    totals = {total["name"]: total for total in tree["totals"]}
    assert totals["model"]["bytes"] == 4 * totals["model"]["elements"]
    assert totals["optim/updates"]["bytes"] == 8
    assert sum(file["bytes"] for file in tree["files"]) == sum(total["bytes"] for total in tree["totals"])


def test_show_of_what_is_not_there(cli: Any, run: Path, tmp_path: Path) -> None:
    result = cli("show", run, "--tensor", "nothing")
    assert (result.exit_code, "no tensor matches 'nothing'" in result.stderr) == (2, True)
    assert "no checkpoint of step 11" in cli("show", run, "--step", 11).stderr
    (tmp_path / "empty").mkdir()
    result = cli("show", tmp_path / "empty")
    assert (result.exit_code, "holds no checkpoint" in result.stderr) == (2, True)
    shard(run, 20, 0).unlink()
    result = cli("show", run)
    assert result.exit_code == 1
    assert "shard-00000.safetensors: the file is missing\nsee planaria checkpoint verify" in result.stderr


# Verify


def test_verify_lists_every_damaged_slice(cli: Any, run: Path) -> None:
    damage(run, 20, "model/lm_head.weight", "optim/exp_avg/lm_head.weight")
    damage(run, 10, "model/lm_head.weight")
    result = cli("verify", run, "--step", 20)
    assert result.exit_code == 1
    assert "step 20: DAMAGED, 2 problems" in result.output
    for name in ("model/lm_head.weight[0:192,0:96]", "optim/exp_avg/lm_head.weight[0:192,0:96]"):
        assert f"step-00000020/shard-00000.safetensors: slice {name}: " in result.stderr
    result = cli("verify", run)
    assert result.stderr.count("safetensors: slice") == 3


def test_verify_lists_every_damaged_file(cli: Any, run: Path) -> None:
    shard(run, 20, 0).unlink()
    with shard(run, 20, 1).open("ab") as file:
        file.write(b"x")
    result = cli("verify", run)
    assert result.exit_code == 1
    assert "step-00000020/shard-00000.safetensors: the file is missing" in result.stderr
    assert "step-00000020/shard-00001.safetensors: " in result.stderr
    assert "step 20: DAMAGED, 2 problems" in result.output
    assert "step 10: intact" in result.output


# Export


def test_export(cli: Any, run: Path, tmp_path: Path, job: JobConfig) -> None:
    result = cli("export", run, "--to", tmp_path / "hf", "--dtype", "bf16", "--step", 10, "--max-file-gb", 0.0001)
    assert result.exit_code == 0, result.stderr
    assert result.output.startswith("step 10: 89 tensors, 1.07M in 13 files") and str(tmp_path / "hf") in result.output
    weight = LlavaForConditionalGeneration.from_pretrained(tmp_path / "hf").lm_head.weight
    assert torch.equal(weight, state_of(job, 1)["model/lm_head.weight"].bfloat16())
    result = cli("export", run, "--to", tmp_path / "hf")
    assert (result.exit_code, "exists and is not empty" in result.stderr) == (2, True)
    assert cli("export", run, "--to", tmp_path / "hf", "--force").output.startswith("step 20: 89 tensors, 2.14M in 1 f")
    result = cli("export", run, "--to", tmp_path / "x", "--dtype", "int4")
    assert (result.exit_code, "choose one of fp32, bf16, fp16" in result.stderr) == (2, True)


def test_export_of_a_damaged_step_takes_no_other(cli: Any, run: Path, tmp_path: Path) -> None:
    damage(run, 20, "model/lm_head.weight")
    result = cli("export", run, "--to", tmp_path / "hf")
    assert result.exit_code == 1
    assert "shard-00000.safetensors: slice model/lm_head.weight[0:192,0:96]: " in result.stderr
    assert "nothing was exported. Step 10 looks intact; to export that one, add --step 10" in result.stderr
    assert not (tmp_path / "hf").exists()
    shard(run, 10, 0).unlink()
    shard(run, 20, 1).unlink()
    result = cli("export", run, "--to", tmp_path / "hf")
    assert (result.exit_code, "no other checkpoint that looks intact" in result.stderr) == (1, True)


def test_export_with_another_job(cli: Any, run: Path, tmp_path: Path, job: JobConfig) -> None:
    config = job_file(job_in(tmp_path, "llava-siglip-qwen-tiny"), tmp_path / "job.yaml")
    result = cli("export", run, "--to", tmp_path / "hf", "--config", config)
    assert (result.exit_code, "its tensors are not those of the job's model" in result.stderr) == (2, True)
    assert cli("export", run, "--to", tmp_path / "hf", "--set", "seed=1").exit_code == 2
    good = cli("export", run, "--to", tmp_path / "hf", "--config", config, "--set", "model.preset=llava-tiny")
    assert good.exit_code == 0, good.stderr


def test_export_when_the_models_directory_is_gone(cli: Any, run: Path, tmp_path: Path) -> None:
    assert cli("export", run, "--to", tmp_path / "hf").exit_code == 0
    again = job_in(tmp_path, model={"path": str(tmp_path / "hf")}, name="again")
    save(again, state_of(again), step=1)
    shutil.rmtree(tmp_path / "hf")
    result = cli("export", tmp_path / "again", "--to", tmp_path / "out")
    assert result.exit_code == 2
    assert "holds no config.json" in result.stderr
    assert not (tmp_path / "out").exists()


# Import


def test_import_and_go_on(cli: Any, run: Path, tmp_path: Path, job: JobConfig) -> None:
    assert cli("export", run, "--to", tmp_path / "hf").exit_code == 0
    config = job_file(job, tmp_path / "job.yaml", name="next")
    result = cli("import", tmp_path / "hf", "--config", config)
    assert result.exit_code == 0, result.stderr
    assert "step 0: 90 tensors, 2.14M, optimizer: 0 updates" in result.output
    assert f"go on with: planaria train {config}\n" in result.output
    with Vault(tmp_path / "next").at(0) as checkpoint:
        assert checkpoint.meta["job"]["name"] == "next"
    again = cli("import", tmp_path / "hf", "--config", config)
    assert (again.exit_code, "the run has checkpoints already" in again.stderr) == (2, True)
    other = cli("import", tmp_path / "hf", "--config", config, "--to", tmp_path / "a/other")
    assert f"planaria train {config} --set storage={tmp_path}/a --set name=other" in other.output
    assert Vault(tmp_path / "a/other").list("deep")[0].intact
    wrong = cli("import", tmp_path / "hf", "--config", config, "--to", tmp_path / "-x")
    assert wrong.exit_code == 2


def test_import_from_torch(cli: Any, tmp_path: Path, job: JobConfig) -> None:
    state = state_of(job)
    weights = {name.removeprefix("model/"): value for name, value in state.items() if name.startswith("model/")}
    dcp.save({"model": weights, "train_state": {"step": torch.tensor(7)}}, checkpoint_id=tmp_path / "dcp")
    config = job_file(job, tmp_path / "job.yaml")
    result = cli("import", tmp_path / "dcp", "--config", config, "--set", "train.steps=5")
    assert (result.exit_code, "step 7 lies beyond the end of the job, train.steps=5" in result.stderr) == (2, True)
    result = cli("import", tmp_path / "dcp", "--config", config)
    assert result.exit_code == 0, result.stderr
    assert "note: no optimizer state: moments begin at zero" in result.output
    assert "note: 1 tensors were not needed (train_state.step)" in result.output
    (tmp_path / "dcp/.metadata").write_bytes(b"cposix\nsystem\n(Vtrue\ntR.")
    result = cli("import", tmp_path / "dcp", "--config", config, "--to", tmp_path / "b")
    assert (result.exit_code, "refused: it names posix.system" in result.stderr) == (2, True)
    assert "Traceback" not in result.output + result.stderr
