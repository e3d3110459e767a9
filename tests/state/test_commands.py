"""``planaria checkpoint`` on object stores."""

import pytest
from tests.state.saved import Bucket, save
from typer.testing import CliRunner

from planaria.cli import app
from planaria.config import parse
from planaria.observe.record import RunRecord
from planaria.state.vault import Vault


@pytest.fixture
def cli(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("NO_COLOR", "1")
    return lambda *arguments: CliRunner().invoke(app, ["checkpoint", *arguments])


def test_ls_and_verify_of_a_url(real_store, url, cli):
    assert "no checkpoints yet" in cli("ls", url).output
    folders = [save(Vault(url), step) for step in (1, 2)]
    done = cli("ls", url)
    assert done.exit_code == 0, done.stderr
    newest = done.output.splitlines()[-2].split()
    assert newest[0] == "2" and newest[-1] == "intact" and newest[2:4] != ["-", "-"]
    assert cli("verify", url).output.splitlines() == ["step 2: intact, 6 slices", "step 1: intact, 6 slices"]
    place = Bucket(real_store, url)
    shard = place.shard(folders[1], 1)
    place.replace(shard, place.read(shard)[:-1] + b"\xff")
    done = cli("verify", url)
    assert done.exit_code == 1 and f"{shard}: slice" in done.stderr and "step 1: intact" in done.output


def test_a_run_directory_knows_where_its_checkpoints_are(real_store, url, cli, tmp_path):
    job = parse(
        {
            "name": "run",
            "model": {"preset": "llava-tiny"},
            "train": {"steps": 9, "global_batch": 2},
            "checkpoint": {"path": url.removesuffix("/run")},
        }
    )
    RunRecord(tmp_path / "run").job(job.model_dump(mode="json"))
    save(Vault(url), 7)
    assert "step 7: intact" in cli("verify", str(tmp_path / "run")).output


def test_what_cannot_be_used(real_store, url, cli, monkeypatch):
    for wrong in ("gs://bucket/run", f"{url}/checkpoints"):
        assert cli("ls", wrong).exit_code == 2
    save(Vault(url), 1)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret-key")
    done = cli("verify", url)
    assert done.exit_code == 2 and "permission denied" in done.stderr and "DAMAGED" not in done.output
