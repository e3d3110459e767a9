"""The command line, without Ray: help, wrong input, plans, the state of runs, checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from planaria.cli import app
from planaria.commands.failures import guarded
from planaria.commands.plan import default_nodes, outlooks, parse_nodes
from planaria.commands.status import SUMMARY_KEYS, read_run, verdict
from planaria.commands.train import stop_code
from planaria.config import load, parse
from planaria.paths import absolute_paths, relative_paths
from planaria.planner.plan import ModelFacts
from planaria.state.boxes import Box, shard_rows
from planaria.state.vault import Vault
from planaria.state.writer import Piece

ROOT = Path(__file__).resolve().parents[1]
MINIMAL = "model: {preset: llava-tiny}\ntrain: {steps: 100, global_batch: 8}\n"
CHECKPOINT_COMMANDS = [f"checkpoint {name}" for name in ("ls", "show", "verify", "export", "import")]
COMMANDS = ["demo", "train", "submit", "stop", "plan", "status", "top", "report", *CHECKPOINT_COMMANDS, "evaluate"]


@pytest.fixture
def cli(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, list(arguments))

    return run


@pytest.fixture
def job_file(tmp_path):
    def write(text: str = MINIMAL) -> str:
        path = tmp_path / "job.yaml"
        path.write_text(text)
        return str(path)

    return write


# Help


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(cli, command):
    result = cli(*command.split(), "--help")
    assert result.exit_code == 0
    assert f"Example: planaria {command}" in result.output


def test_no_arguments_show_help(cli):
    assert "checkpoint" in cli().output


def test_version(cli):
    from planaria import __version__

    assert cli("--version").output.strip() == __version__


def test_help_loads_nothing_heavy():
    code = (
        "import sys, planaria.cli, planaria.commands.failures, planaria.commands.train; "
        "print(sorted({'torch', 'ray', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "platform", capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


# Wrong input


@pytest.mark.parametrize("command", ["train", "plan", "evaluate"])
def test_a_typo_is_one_message_and_exit_code_2(cli, job_file, command):
    result = cli(command, job_file(MINIMAL + "optim: {lrr: 0.001}\n"))
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "optim.lrr: unknown key (value 0.001); did you mean optim.lr?" in result.stderr
    assert "Traceback" not in result.output + result.stderr


def test_a_missing_file(cli):
    result = cli("train", "nowhere.yaml")
    assert result.exit_code == 2
    assert "nowhere.yaml: no such file" in result.stderr


def test_an_override_that_is_wrong(cli, job_file):
    result = cli("train", job_file(), "--set", "train.steps=2.5")
    assert result.exit_code == 2
    assert "train.steps" in result.stderr


def test_an_interrupt_is_130(capsys):
    def interrupted() -> int:
        raise KeyboardInterrupt

    assert guarded(interrupted) == 130
    assert "interrupted" in capsys.readouterr().err


def test_an_unknown_error_is_not_hidden():
    def broken() -> int:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError):
        guarded(broken)


# Train


def test_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = {"source": "files", "path": "a/train-*.tar", "val_path": "/b/val-*.tar", "image_root": "s3://b/c"}
    tree = {"model": {"path": "weights"}, "data": data, "train": {"steps": 1, "global_batch": 1}}
    job = absolute_paths(parse(tree))
    assert job.data.path == f"{tmp_path}/a/train-*.tar"
    assert job.data.val_path == "/b/val-*.tar"
    assert job.data.image_root == "s3://b/c" and job.data.cache_dir is None
    assert job.data.tokenizer == "bytes"
    assert job.model is not None and job.model.path == f"{tmp_path}/weights"
    assert job.storage == f"{tmp_path}/runs"
    mixture = [{"name": "a", "path": "a/*.tar"}, {"name": "b", "path": "s3://b/c"}]
    mixed = parse(tree | {"data": {"source": "files", "mixture": mixture}})
    assert [source.path for source in absolute_paths(mixed).data.mixture] == [f"{tmp_path}/a/*.tar", "s3://b/c"]
    assert "data.mixture.0.path" in relative_paths(mixed) and "data.mixture.1.path" not in relative_paths(mixed)


@pytest.mark.parametrize(("why", "code"), [("Ctrl-C", 130), ("SIGTERM", 143), (None, 130)])
def test_exit_code_of_a_stop(why, code):
    assert stop_code(why) == code


# Plan


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("4x2", [2] * 4), ("2,2,1", [2, 2, 1]), ("3x2,1x8", [2, 2, 2, 8]), (" 1 ", [1]), ("2*3", [3, 3])],
)
def test_parse_nodes(text, sizes):
    assert parse_nodes(text) == sizes


@pytest.mark.parametrize("text", ["", "x", "0", "2x0", "-1", "2x2x2", "a,b", "9999999x1", "4096x1,1"])
def test_nodes_that_are_none(text, cli, job_file):
    result = cli("plan", job_file(), "--nodes", text)
    assert result.exit_code == 2
    assert "--nodes" in result.stderr


def job_with(**elastic: int):
    tree = {"model": {"preset": "llava-tiny"}, "train": {"steps": 9, "global_batch": 6}}
    return parse(tree | {"layout": {"tp": 2}, "elastic": {"max_workers": 8} | elastic})


def test_outlooks_as_nodes_are_lost():
    looks = outlooks(job_with(min_workers=2), ModelFacts(), [2, 2, 1, 1])
    assert [(look.nodes, look.workers) for look in looks] == [(4, 6), (3, 5), (2, 4), (1, 2)]
    assert [str(look.plan.layout) for look in looks if look.plan] == [
        "dp_shard2xtp2",
        "dp_shard2xtp2",
        "dp_shard2xtp2",
        "tp2",
    ]
    assert "spare" in looks[0].note


def test_outlook_below_the_minimum_and_above_the_maximum():
    looks = outlooks(job_with(min_workers=4, max_workers=4), ModelFacts(), [2, 2, 2])
    assert looks[0].plan is not None and len(looks[0].plan.ranks) == 4
    assert "2 not started: elastic.max_workers=4" in looks[0].note
    assert looks[-1].plan is None
    assert "elastic.min_workers=4" in looks[-1].note


def test_default_nodes_carry_the_most_workers():
    assert default_nodes(job_with(max_workers=7)) == [2, 2, 2, 2]


def test_plan_prints_a_row_per_cluster(cli, job_file):
    text = MINIMAL + "layout: {tp: 2}\nelastic: {max_workers: 8}\n"
    result = cli("plan", job_file(text), "--nodes", "4x2")
    assert result.exit_code == 0, result.stderr
    for layout in ("dp_shard4xtp2", "dp_shard3xtp2", "dp_shard2xtp2"):
        assert layout in result.output
    assert "2 or 3" in result.output  # samples per replica on three replicas


def test_plan_refuses_a_tp_that_the_model_cannot_have(cli, job_file):
    result = cli("plan", job_file(MINIMAL + "layout: {tp: 3}\nelastic: {max_workers: 6}\n"))
    assert result.exit_code == 2
    assert "layout.tp" in result.stderr


# Status


def lines(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)


def generation(number: int, at: float, step: int, cause: str = "start", workers: int = 4) -> dict[str, Any]:
    return {
        "time": at,
        "event": "generation",
        "text": f"generation {number}",
        "gen": number,
        "layout": f"dp_shard{workers}",
        "workers": [f"worker-{i}" for i in range(workers)],
        "spares": [],
        "step": step,
        "cause": cause,
    }


def state(at: float, before: str, after: str) -> dict[str, Any]:
    return {"time": at, "event": "state", "from": before, "to": after}


def metric(at: float, step: int, gen: int = 1) -> dict[str, Any]:
    return {"time": at, "step": step, "loss": 1.0 / (step + 1), "gen": gen, "layout": "dp_shard4"}


EVENTS = (
    {"time": 1.0, "event": "joined", "text": "worker-0 is ready"},
    generation(1, 2.0, 0),
    state(3.0, "forming", "running"),
    {"time": 4.0, "event": "checkpoint", "text": "checkpoint of step 2 is durable", "step": 2},
    {"time": 5.0, "event": "fault", "text": "worker-3: its process ended"},
    generation(2, 6.0, 2, "lost worker-3", 3),
    {"time": 7.0, "event": "recovered", "text": "generation 2: first step", "gen": 2, "seconds": 0.75},
    state(7.1, "forming", "running"),
)
METRICS = (metric(3.0, 0), metric(3.5, 1), metric(4.5, 2), metric(7.0, 2, 2), metric(8.0, 3, 2))


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "events.jsonl").write_text(lines(*EVENTS))
    (folder / "metrics.jsonl").write_text(lines(*METRICS))
    return folder


def test_status_of_a_running_job(run_dir):
    run = read_run(run_dir, now=10.0)
    assert (run.state, run.step, run.loss, run.checkpoint_step) == ("running", 4, 0.25, 2)
    assert [(row["from_step"], row["to_step"], row["recovery_s"]) for row in run.generations] == [
        (0, 3, None),
        (2, 4, 0.75),
    ]
    assert verdict(run) == "running"


def test_status_names_nodes_in_quarantine(run_dir, cli):
    held = {"event": "quarantined", "text": "node abc gets no work", "node": "abcdef123456", "reason": "it hangs"}
    with (run_dir / "events.jsonl").open("a") as out:
        out.write(lines({"time": 8.5, "seconds": 60.0, **held}))
    (row,) = read_run(run_dir, now=10.0).nodes
    assert (row["quarantined"], row["seconds_left"], row["times"]) == (True, 58.5, 1)
    assert "abcdef12 (1x, over: it hangs)" in cli("status", str(run_dir)).output


def test_status_of_a_crashed_job(run_dir):
    run = read_run(run_dir, now=1000.0)
    assert "crashed" in verdict(run)


def test_status_of_a_torn_run(run_dir, cli):
    for name in ("events", "metrics"):
        with (run_dir / f"{name}.jsonl").open("a") as out:
            out.write('{"time":9.0,"event":"chec')
    (run_dir / "summary.json").write_text('{"state": "fini')
    result = cli("status", str(run_dir))
    assert result.exit_code == 0, result.stderr
    for part in ("running", "crashed", "lost worker-3", "0.75 s", "dp_shard3"):
        assert part in result.output


def test_status_survives_foreign_lines(run_dir):
    (run_dir / "metrics.jsonl").write_text('[]\n3\nnull\n{"step": "x"}\n' + lines(*METRICS))
    assert read_run(run_dir, now=10.0).step == 4


def test_status_of_a_finished_run(run_dir, cli):
    with (run_dir / "events.jsonl").open("a") as out:
        out.write(lines(state(9.0, "running", "finished")))
    summary = {
        "state": "finished",
        "error": None,
        "steps": 4,
        "loss": 0.25,
        "seconds": 8.0,
        "generations": [],
        "evaluation": {"samples": 4, "exact_match": 0.5, "questions": 4, "accuracy": 0.5, "chance": 0.125},
        "checkpoint_step": 4,
        "bad_samples": 0,
        "run_dir": str(run_dir),
    }
    (run_dir / "summary.json").write_text(json.dumps(summary))
    result = cli("status", str(run_dir), "--events", "1")
    assert result.exit_code == 0, result.stderr
    for part in ("finished", "chance is 12.5% (4.0x)", "8.00 s"):
        assert part in result.output
    assert read_run(run_dir, now=1000.0).quiet_s is None


def test_status_shows_where_the_time_went(run_dir, cli):
    def account(productive: float, **losses: float) -> dict[str, float]:
        wall = productive + sum(losses.values())
        return {"productive": productive} | losses | {"wall": wall, "goodput": productive / wall}

    rows = [{"time": 0.5, **account(99.0)}, {"time": 7.0, **account(3.0, startup=1.0)}]
    (run_dir / "goodput.jsonl").write_text(lines(*rows) + '{"time":8.0}\n{"ti')
    result = cli("status", str(run_dir))
    assert result.exit_code == 0, result.stderr
    assert "75.0%; most lost to start-up 1.00 s" in result.output
    with (run_dir / "events.jsonl").open("a") as out:
        out.write(lines(state(9.0, "running", "finished")))
    summary = {name: 0 for name in SUMMARY_KEYS} | {"state": "finished", "generations": []}
    (run_dir / "summary.json").write_text(json.dumps(summary | {"goodput": account(1.0, recovery_form=3.0)}))
    result = cli("status", str(run_dir))
    assert result.exit_code == 0, result.stderr
    for part in ("25.0%; most lost to recovery 3.00 s", "form 3.00 s", "all"):
        assert part in result.output


def test_status_of_a_run_that_was_started_again(run_dir):
    with (run_dir / "events.jsonl").open("a") as out:
        out.write(
            lines(state(9.0, "running", "stopped"), {"time": 20.0, "event": "joined", "text": "worker-0 is ready"})
        )
    (run_dir / "summary.json").write_text("{}")
    waiting = read_run(run_dir, now=21.0)
    assert (waiting.state, waiting.attempts, waiting.generations) == ("waiting", 2, [])
    with (run_dir / "events.jsonl").open("a") as out:
        out.write(lines(generation(1, 22.0, 4), state(23.0, "forming", "running")))
    with (run_dir / "metrics.jsonl").open("a") as out:
        out.write(lines(metric(23.0, 4)))
    again = read_run(run_dir, now=24.0)
    assert (again.state, again.attempts, again.step) == ("running", 2, 5)
    assert [(row["from_step"], row["to_step"]) for row in again.generations] == [(4, 5)]


@pytest.mark.parametrize("content", [None, "empty"])
def test_status_of_no_run(tmp_path, cli, content):
    folder = tmp_path / "x"
    if content:
        folder.mkdir()
    result = cli("status", str(folder))
    assert result.exit_code == 2
    assert str(folder) in result.stderr


def test_status_says_when_it_happened(run_dir, cli):
    assert time.strftime("%Y-%m-%d", time.localtime(1.0)) in cli("status", str(run_dir)).output


# Checkpoints


@pytest.fixture
def vault_dir(tmp_path):
    folder = tmp_path / "run"
    for step in (10, 20):
        vault, slices = Vault(folder), []
        whole = {name: torch.full((6, 4), float(step)) for name in ("model/a", "optim/exp_avg/a")}
        for rank in range(2):
            box = shard_rows((6, 4), rank, 2)
            pieces = [Piece(n, (6, 4), box, t[box.relative_to(Box.whole((6, 4)))]) for n, t in whole.items()]
            slices += vault.writer(step, "t").write_shard(rank, pieces)
        vault.writer(step, "t").commit(slices, {"layout": "dp_shard2"})
    return folder


def flip_last_byte(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def test_checkpoint_ls(vault_dir, cli):
    result = cli("checkpoint", "ls", str(vault_dir))
    assert result.exit_code == 0, result.stderr
    newest, older = [line.split() for line in result.output.splitlines()[-2:]]
    assert (newest[0], newest[1], newest[-1]) == ("20", "dp_shard2", "intact")
    assert older[0] == "10"


def test_checkpoint_ls_of_nothing(tmp_path, cli):
    result = cli("checkpoint", "ls", str(tmp_path))
    assert result.exit_code == 0
    assert "no checkpoints yet" in result.output


def test_checkpoint_ls_names_damage(vault_dir, cli):
    (vault_dir / "checkpoints/step-00000020/shard-00001.safetensors").unlink()
    result = cli("checkpoint", "ls", str(vault_dir))
    assert result.exit_code == 0
    assert "missing" in result.output


def test_checkpoint_verify(vault_dir, cli):
    result = cli("checkpoint", "verify", str(vault_dir))
    assert result.exit_code == 0, result.stderr
    assert result.output.splitlines() == ["step 20: intact, 4 slices", "step 10: intact, 4 slices"]


def test_a_flipped_byte_is_found_and_named(vault_dir, cli):
    flip_last_byte(vault_dir / "checkpoints/step-00000020/shard-00001.safetensors")
    result = cli("checkpoint", "verify", str(vault_dir))
    assert result.exit_code == 1
    assert "step-00000020/shard-00001.safetensors: slice" in result.stderr
    assert "step 20: DAMAGED" in result.output
    assert "step 10: intact" in result.output
    assert cli("checkpoint", "verify", str(vault_dir), "--step", "10").exit_code == 0


def test_a_checkpoint_that_is_not_there(vault_dir, cli):
    result = cli("checkpoint", "verify", str(vault_dir), "--step", "15")
    assert result.exit_code == 1
    assert "no checkpoint of step 15" in result.stderr


def test_the_wrong_folder(vault_dir, cli):
    assert cli("checkpoint", "ls", str(vault_dir / "nowhere")).exit_code == 2
    assert cli("checkpoint", "ls", str(vault_dir / "checkpoints")).exit_code == 2


def test_evaluate_without_a_checkpoint(tmp_path, cli, job_file):
    result = cli("evaluate", job_file(MINIMAL + f"storage: {tmp_path}\n"))
    assert result.exit_code == 2
    assert "no intact checkpoint" in result.stderr
    assert cli("evaluate", str(tmp_path), "--set", "seed=1").exit_code == 2


# The configs that come with the project


@pytest.mark.parametrize("name", ["scenes", "emoji", "deepspeed", "conversations"])
def test_shipped_configs_are_sound(name, monkeypatch):
    monkeypatch.delenv("PLANARIA_EMOJI", raising=False)
    monkeypatch.setenv("PLANARIA_STORAGE", "/shared/runs")
    job = load(ROOT / f"jobs/configs/{name}.yaml")
    assert job.name == name
    assert job.storage == "/shared/runs"
    if name == "emoji":
        assert job.data.path == "../shared/data/emoji/train-*.tar"
        monkeypatch.setenv("PLANARIA_EMOJI", "/data")
        assert load(ROOT / "jobs/configs/emoji.yaml").data.path == "/data/train-*.tar"


def test_job_scripts_find_the_package_beside_them(tmp_path):
    """As in a Ray job's working directory, in an environment without the package."""
    import os

    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    for script, *arguments in (
        ("train",),
        ("plan",),
        ("evaluate",),
        ("export", "--to", "x", "--config", "nowhere.yaml"),
    ):
        done = subprocess.run(
            [sys.executable, str(ROOT / f"jobs/{script}.py"), "nowhere.yaml", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2
        assert "nowhere.yaml: no such" in done.stderr
