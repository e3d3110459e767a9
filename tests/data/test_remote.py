"""Data in an object store: the same samples as from a disk, through faults, and clear errors."""

from __future__ import annotations

import contextlib
import gzip
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.data import sets
from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.object_stores import BUCKET, Store, moto
from typer.testing import CliRunner

from planaria.cli import app
from planaria.config import DataConfig
from planaria.data import files
from planaria.data.errors import DataError, DataUnreachable
from planaria.data.files import find_files
from planaria.data.formats import FileDataset, open_files
from planaria.recipe import BadSample
from planaria.state.retry import RetryPolicy


@pytest.fixture(scope="module")
def running() -> Iterator[Store]:
    with moto() as store:
        yield store


@pytest.fixture
def proxy(running: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A faulty way to the store, which the environment names."""
    proxy = FaultyProxy(running.endpoint)
    for name, value in (running.environment() | {"AWS_ENDPOINT_URL": proxy.endpoint}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(files, "POLICY", RetryPolicy(attempts=4, first_s=0.02, longest_s=0.1))
    files.client.cache_clear()
    assert running.client
    yield proxy
    proxy.close()
    files.client.cache_clear()


def uploaded(store: Store, folder: Path) -> str:
    prefix = uuid.uuid4().hex
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            store.client.upload_file(str(path), BUCKET, f"{prefix}/{path.relative_to(folder)}")
    return f"s3://{BUCKET}/{prefix}"


def opened(path: str, cache: Path, **keys: object) -> FileDataset:
    tree = {"source": "files", "path": path, "prompt": "Say.", "cache_dir": str(cache), **keys}
    return open_files(path, DataConfig.model_validate(tree))


def packed_tars(folder: Path) -> Path:
    sets.webdataset(folder, sets.twenty())
    for path in folder.glob("*.tar"):
        path.with_suffix(".tar.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    return folder


KINDS: dict[str, Callable[[Path], Path]] = {
    "webdataset": lambda folder: sets.webdataset(folder, sets.twenty()),
    "tar.gz": packed_tars,
    "parquet": lambda folder: sets.parquet(folder, sets.twenty()),
    "hf": lambda folder: sets.hf(folder, sets.twenty()),
    "mds": lambda folder: sets.mds(folder, sets.twenty(), sets.zstd),
    "json": lambda folder: sets.llava(folder, sets.twenty()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_samples_as_from_a_disk(running: Store, proxy: FaultyProxy, tmp_path: Path, kind: str) -> None:
    (tmp_path / "set").mkdir()
    local = opened(str(KINDS[kind](tmp_path / "set")), tmp_path / "local")
    url = uploaded(running, tmp_path / "set") + ("/train.json" if kind == "json" else "")
    remote = opened(url, tmp_path / "cache")
    for index in (13, 0, 19, 14):
        mine, theirs = remote[index], local[index]
        assert (mine.key, mine.answer) == (theirs.key, theirs.answer)
        assert mine.image is not None and theirs.image is not None and (mine.image == theirs.image).all()
    before = len(proxy.seen)
    again = opened(url, tmp_path / "cache")
    assert again[13].answer == "caption 13"
    if kind != "json":  # whose pictures are fetched one by one
        gets = [line for line in proxy.seen[before:] if "list-type" not in line and ".json" not in line]
        assert [line for line in gets if ".parquet" not in line] == [], "shards and their indices are in the cache"


@pytest.mark.parametrize(
    "fault",
    [
        Fault("status", "GET .*tar", times=3),
        Fault("reset", "GET .*tar", times=2, after=600),
        Fault("short", "GET .*tar", times=2, after=900),
        Fault("status", "GET .*list-type", times=2, status=500, code="InternalError"),
    ],
    ids=lambda fault: fault.kind,
)
def test_faults_that_pass_are_ridden_out(running: Store, proxy: FaultyProxy, tmp_path: Path, fault: Fault) -> None:
    (tmp_path / "set").mkdir()
    url = uploaded(running, sets.webdataset(tmp_path / "set", sets.twenty()))
    fault.hits = 0
    proxy.faults.append(fault)
    dataset = opened(url, tmp_path / "cache")
    assert [dataset[i].answer for i in range(20)] == [f"caption {i}" for i in range(20)]
    assert fault.hits == fault.times


def test_a_store_that_stays_away_is_told_and_spoils_no_sample(
    running: Store, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "set").mkdir()
    url = uploaded(running, sets.webdataset(tmp_path / "set", sets.twenty()))
    dataset = opened(url, tmp_path / "cache")
    dataset.close()
    for path in (tmp_path / "cache").iterdir():
        path.unlink()
    proxy.faults.append(Fault("status", "GET", times=4))
    with pytest.raises(DataUnreachable, match=r"the store cannot be used after 4 tries .*SlowDown"):
        dataset[0]
    assert dataset[0].answer == "caption 0"  # it is back
    with pytest.raises(DataError, match=r"no file matches"):
        opened(f"{url}/nothing-*.tar", tmp_path / "cache")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free.getsockname()[1]}")
    files.client.cache_clear()
    with pytest.raises(DataUnreachable, match=r"cannot be used after 4 tries .*check AWS_ENDPOINT_URL"):
        opened(url, tmp_path / "cache")
    done = CliRunner().invoke(app, ["data", "inspect", url])
    assert done.exit_code == 1 and "cannot be used after 4 tries" in done.stdout
    with pytest.raises(DataError, match=r"gs://\.\.\.: is no place for data; give a local path or s3://"):
        opened("gs://bucket/x", tmp_path / "cache")


@pytest.mark.parametrize("kind", KINDS)
def test_an_outage_at_the_start_is_no_damage(running: Store, proxy: FaultyProxy, tmp_path: Path, kind: str) -> None:
    """It is an error that another attempt may mend: a loader that begins meanwhile is started again."""
    (tmp_path / "set").mkdir()
    KINDS[kind](tmp_path / "set")
    url = uploaded(running, tmp_path / "set") + ("/train.json" if kind == "json" else "")
    proxy.faults.append(Fault("status", r"GET (?!.*list-type)", times=99))
    with pytest.raises(DataUnreachable, match="SlowDown"):
        opened(url, tmp_path / "cache")
    proxy.faults.clear()
    assert opened(url, tmp_path / "cache")[0].answer == "caption 0"


def test_remote_shards_are_indexed_together(running: Store, proxy: FaultyProxy, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    url = uploaded(running, sets.webdataset(tmp_path / "set", sets.twenty()))
    both, met = threading.Barrier(2), []

    def meet(line: str) -> None:
        if ".tar" in line and "list-type" not in line:
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(10)
                met.append(line)

    proxy.delay = meet
    assert opened(url, tmp_path / "cache")[19].answer == "caption 19"
    assert len(met) == 2


def test_a_picture_that_is_not_there_is_bad_and_globs_stay_in_their_folder(
    running: Store, proxy: FaultyProxy, tmp_path: Path
) -> None:
    (tmp_path / "set" / "deep").mkdir(parents=True)
    sets.llava(tmp_path / "set", sets.twenty())
    (tmp_path / "set" / "pictures" / "s0001.png").unlink()
    for name in ("a-1.tar", "a-2.tar", "b-1.tar", "deep/a-3.tar", "a+.tar", ".hidden.tar"):
        (tmp_path / "set" / name).write_bytes(b"x")
    url = uploaded(running, tmp_path / "set")
    dataset = opened(f"{url}/train.json", tmp_path / "cache")
    assert dataset[0].answer == "caption 0"
    with pytest.raises(BadSample, match=r"s0001\.png cannot be read \(No such file"):
        dataset[1]
    for pattern, names in {
        "a-*.tar": ["a-1.tar", "a-2.tar"],
        "[ab]-1.tar": ["a-1.tar", "b-1.tar"],
        "**/a-?.tar": ["a-1.tar", "a-2.tar", "a-3.tar"],
        "a+.tar": ["a+.tar"],
        "deep": ["a-3.tar"],
    }.items():
        for place in (url, str(tmp_path / "set")):
            assert [file.name for file in find_files(f"{place}/{pattern}")] == names
    assert [file.name for file in find_files(url, lambda name: name.endswith("1.tar"))] == ["a-1.tar", "b-1.tar"]
