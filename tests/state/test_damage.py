"""Every way a checkpoint breaks: it is named, skipped, and never costs an intact one."""

import errno
import gc
import os
import shutil
import subprocess
import threading

import pytest
import torch
from tests.state.conftest import chosen
from tests.state.saved import DATA_BYTES, SHAPE, Bucket, Folder, save, state, write

from planaria.state.boxes import Box
from planaria.state.errors import CheckpointDamaged, CheckpointError
from planaria.state.local_storage import LocalStorage
from planaria.state.vault import Vault
from planaria.state.writer import Piece


@pytest.fixture(params=["folder", "seaweedfs", "moto"])
def place(request, monkeypatch):
    """Every kind of place in turn."""
    if request.param == "folder":
        return Folder(request.getfixturevalue("tmp_path"))
    store = request.getfixturevalue({"seaweedfs": "weed", "moto": "mock"}[request.param])
    return Bucket(chosen(store, monkeypatch), request.getfixturevalue("url"))


@pytest.fixture
def problems():
    return []


@pytest.fixture
def vault(tmp_path, problems):
    return Vault(tmp_path, keep_last=2, on_problem=problems.append)


@pytest.fixture
def anywhere(place, problems):
    return Vault(place.root, keep_last=2, on_problem=problems.append)


def flipped(data: bytes, position: int) -> bytes:
    raw = bytearray(data)
    raw[position] ^= 1
    return bytes(raw)


def flip(path: str, position: int) -> None:
    with open(path, "rb") as file:
        raw = file.read()
    with open(path, "r+b") as out:
        out.write(flipped(raw, position))


def truncate(path: str) -> None:
    os.truncate(path, os.path.getsize(path) - 1)


def edited(data: bytes, old: bytes, new: bytes) -> bytes:
    assert old in data
    return data.replace(old, new)


SHARD = "shard-00001"
MANIFEST = "manifest.json"
CHANGED = {
    "truncated shard": (SHARD, lambda data: data[:-1]),
    "half a shard": (SHARD, lambda data: data[: len(data) // 2]),
    "empty shard": (SHARD, lambda data: b""),
    "grown shard": (SHARD, lambda data: data + b"x"),
    "damaged shard header": (SHARD, lambda data: flipped(data, 9)),
    "damaged header length": (SHARD, lambda data: flipped(data, 1)),
    "shard of another rank": (SHARD, None),
    "missing shard": (SHARD, lambda data: None),
    "truncated manifest": (MANIFEST, lambda data: data[:-1]),
    "empty manifest": (MANIFEST, lambda data: b""),
    "half a manifest": (MANIFEST, lambda data: data[: len(data) // 2]),
    "edited manifest": (MANIFEST, lambda data: edited(data, b'{"step":2}', b'{"step":3}')),
    "edited checksum": (MANIFEST, lambda data: flipped(data, 15)),
}


@pytest.mark.parametrize("case", CHANGED)
def test_damage_is_named_and_skipped(anywhere, place, problems, case):
    file, change = CHANGED[case]
    save(anywhere, 1)
    folder = save(anywhere, 2)
    path = place.shard(folder, 1) if file == SHARD else f"{folder}/{file}"
    changed = change(place.read(path)) if change else place.read(place.shard(folder, 0))
    place.remove(path) if changed is None else place.replace(path, changed)
    found = anywhere.latest_intact()
    assert found.step == 1 and torch.equal(found.read("model/a"), state(1)["model/a"])
    if case == "shard of another rank":
        assert "[3:6,0:4]" in problems[0]
    assert len(problems) == 1 and path in problems[0]
    newer, older = anywhere.list()
    assert (newer.step, newer.intact, newer.problem) == (2, False, problems[0])
    assert (older.step, older.intact, older.problem) == (1, True, None)
    gc.collect()  # so that none of an earlier test is closed in between
    descriptors = len(os.listdir("/proc/self/fd"))
    anywhere.list("deep")
    anywhere.latest_intact().close()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_missing_manifest(anywhere, place, problems):
    """In a folder that is damage; in an object store it is an attempt that was not committed."""
    save(anywhere, 1)
    place.remove(f"{save(anywhere, 2)}/{MANIFEST}")
    assert anywhere.latest_intact().step == 1
    if isinstance(place, Folder):
        assert len(problems) == 1 and MANIFEST in problems[0] and "missing" in problems[0]
    else:
        assert not problems and [info.step for info in anywhere.list()] == [1]
    save(anywhere, 3, token="next")
    save(anywhere, 4, token="next")
    assert place.names() == ["step-00000003", "step-00000004"]


def test_a_shard_that_is_a_folder(vault, problems):
    save(vault, 1)
    path = f"{save(vault, 2)}/shard-00001.safetensors"
    os.remove(path)
    os.mkdir(path)
    assert vault.latest_intact().step == 1 and path in problems[0]


def test_every_flipped_byte_of_the_data_is_found(anywhere, place, problems):
    vault = anywhere
    save(vault, 1)
    path = place.shard(save(vault, 2), 1)
    good = place.read(path)
    for position in range(-DATA_BYTES, 0, 7 if isinstance(place, Folder) else 41):
        place.replace(path, flipped(good, position))
        shallow = vault.latest_intact()
        assert shallow.step == 2
        (problem,) = shallow.verify()
        assert SHARD in problem and "[3:6,0:4]" in problem and "checksum" in problem
        assert vault.latest_intact(deep=True).step == 1 and problems == [problem]
        problems.clear()
        place.replace(path, good)
    assert vault.latest_intact(deep=True).step == 2
    place.replace(path, flipped(good, -1))
    with pytest.raises(CheckpointDamaged) as caught:
        vault.latest_intact().read("optim/exp_avg/a", Box((3, 0), (1, 1)))
    assert caught.value.file == path and caught.value.slice == "optim/exp_avg/a[3:6,0:4]"


def test_shard_cut_while_open_is_an_error_not_a_crash(anywhere, place):
    path = place.shard(save(anywhere, 1), 1)
    found = anywhere.latest_intact()
    place.replace(path, place.read(path)[:-1])
    with pytest.raises(CheckpointDamaged, match="1 bytes too early"):
        found.read("optim/exp_avg/a")


def test_crash_before_commit_is_not_visible(anywhere, place):
    vault = anywhere
    save(vault, 1)
    write(vault, 2, "dead")
    assert [info.step for info in vault.list()] == [1] and vault.latest_intact().step == 1
    write(vault, 3, "t")
    save(vault, 2)  # clears leftovers of other tokens only
    assert place.names()[:2] == ["step-00000001", "step-00000002"]
    assert all("step-00000003" in name and "-t" in name for name in place.names()[2:]) and len(place.names()) > 2
    vault.writer(3, "t").abort()
    assert place.names() == ["step-00000001", "step-00000002"]


def test_local_names_of_an_attempt(vault, tmp_path):
    save(vault, 1)
    vault.writer(2, "dead").write_shard(0, [Piece("w", (), Box.whole(()), torch.tensor(1.0))])
    assert [info.step for info in vault.list()] == [1] and vault.latest_intact().step == 1
    vault.writer(3, "t").write_shard(0, [Piece("w", (), Box.whole(()), torch.tensor(1.0))])
    save(vault, 2)  # clears leftovers of other tokens only
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-00000001", "step-00000002", "step-00000003.tmp-t"]
    vault.writer(3, "t").abort()
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-00000001", "step-00000002"]


def test_shard_lost_before_commit(vault, tmp_path):
    writer = vault.writer(1, "t")
    slices = writer.write_shard(0, [Piece("w", (), Box.whole(()), torch.tensor(1.0))])
    os.remove(tmp_path / "checkpoints/step-00000001.tmp-t/shard-00000.safetensors")
    with pytest.raises(CheckpointError, match=r"shard-00000.*No such file"):
        writer.commit(slices, {})
    assert os.listdir(tmp_path / "checkpoints") == []
    with pytest.raises(CheckpointError, match="No such file"):
        writer.commit(slices, {})


def test_same_step_again_replaces_anywhere(anywhere, place):
    save(anywhere, 1)
    before = save(anywhere, 2)
    for again in ("again", "again", "t"):  # a token that is used again harms nothing
        assert save(anywhere, 2, token=again, value=5) == before
        assert torch.equal(anywhere.latest_intact(deep=True).read("model/a"), state(5)["model/a"])
        assert place.names() == ["step-00000001", "step-00000002"]
    assert [info.intact for info in anywhere.list("deep")] == [True, True]


def test_same_step_again_replaces(vault, tmp_path):
    save(vault, 1)
    save(vault, 2)
    held_open = vault.latest_intact()
    save(vault, 2, token="again", value=5)
    assert torch.equal(vault.latest_intact().read("model/a"), state(5)["model/a"])
    assert torch.equal(held_open.read("model/a"), state(2)["model/a"])  # the replaced one, whole
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("stage", ["before", "between", "after"])
def test_crash_while_replacing_leaves_one_of_the_two(vault, tmp_path, monkeypatch, stage):
    class Crash(BaseException):
        pass

    save(vault, 2)
    rename, calls = os.rename, []

    def crashing(source, target):
        calls.append(source)
        if len(calls) == {"before": 1, "between": 2, "after": 3}[stage]:
            raise Crash
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", crashing)
        with pytest.raises(Crash):
            save(vault, 2, token="again", value=5)
    found = vault.latest_intact()
    expected = state(5 if stage == "after" else 2)
    assert torch.equal(found.read("model/a"), expected["model/a"])
    save(vault, 2, token="again", value=6)
    assert torch.equal(vault.latest_intact().read("model/a"), state(6)["model/a"])
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000002"]


def test_failed_rename_puts_the_old_one_back(vault, monkeypatch):
    save(vault, 2)
    rename = os.rename

    def failing(source, target):
        if ".tmp-" in source and ".gone-" not in target:
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(CheckpointError, match="Input/output"):
        save(vault, 2, token="again", value=5)
    (info,) = vault.list()
    assert info.intact and info.path.endswith("/step-00000002")


def test_full_disk(tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a full disk needs the right to mount a tmpfs: {mounted.stderr.strip()}")
    try:
        vault = Vault(place)
        save(vault, 1)
        big = torch.zeros(1 << 20, dtype=torch.uint8)
        with pytest.raises(CheckpointError, match=r"no space: .*bytes needed.*bytes free.*keep_last") as caught:
            vault.writer(2, "t").write_shard(0, [Piece("w", (1 << 20,), Box.whole((1 << 20,)), big)])
        assert f"{place}/checkpoints/step-00000002.tmp-t/shard-00000.safetensors" in str(caught.value)
        assert os.listdir(place / "checkpoints") == ["step-00000001"]
        writer = vault.writer(2, "t")
        slices = writer.write_shard(0, [Piece("w", (1 << 19,), Box.whole((1 << 19,)), big[: 1 << 19])])
        with pytest.raises(CheckpointError, match=r"manifest\.json: no space"):
            writer.commit(slices, {"note": "x" * (1 << 19)})
        assert os.listdir(place / "checkpoints") == ["step-00000001"]
        found = vault.latest_intact(deep=True)
        assert found.step == 1
        found.close()
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def test_unwritable_place(tmp_path):
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match=r"step-00000001\.tmp-t.*writable"):
        save(Vault(tmp_path), 1)
    with pytest.raises(CheckpointError, match="cannot be listed"):
        Vault(tmp_path).latest_intact()
    assert Vault(tmp_path / "absent").latest_intact() is None and Vault(tmp_path / "absent").list() == []


def test_retention_keeps_the_last_intact(anywhere, place, problems):
    vault = anywhere

    def steps():
        return [info.step for info in vault.list("names")]

    save(vault, 1)
    two = place.shard(save(vault, 2), 1)
    place.replace(two, flipped(place.read(two), -1))  # a shallow look does not see this
    save(vault, 3)
    assert steps() == [3, 2, 1] and "step-00000002" in problems[0]
    for path in (f"{info.path}/{MANIFEST}" for info in vault.list() if info.step == 3):
        place.replace(path, place.read(path)[:-1])
    save(vault, 4)
    assert steps() == [4, 3, 2, 1]
    save(vault, 5)
    assert steps() == [5, 4]
    assert all(info.intact for info in vault.list("deep"))
    save(vault, 6, token="next")  # whose clean-up takes the shards that a damaged manifest no longer named
    assert place.names() == ["step-00000005", "step-00000006"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write and read everywhere, whatever the mode says")
def test_a_folder_without_permission(vault, tmp_path):
    path = save(vault, 1)
    folder = tmp_path / "checkpoints"
    folder.chmod(0o500)
    try:
        with pytest.raises(CheckpointError, match=r"step-00000002.*Permission denied.*writable"):
            save(vault, 2)
        os.chmod(f"{path}/shard-00001.safetensors", 0)
        with pytest.raises(CheckpointError, match=r"shard-00001.*Permission denied"):
            vault.at(1)
    finally:
        folder.chmod(0o700)


def test_milestones_stay(place, problems):
    vault = Vault(place.root, keep_last=1, keep_every=4, on_problem=problems.append)
    for step in range(1, 10):
        save(vault, step)
    assert [info.step for info in vault.list("deep") if info.intact] == [9, 8, 4] and not problems
    save(vault, 4, token="again", value=7)
    assert torch.equal(vault.at(4).read("model/a"), state(7)["model/a"])
    assert place.names() == ["step-00000004", "step-00000008", "step-00000009"]


def test_retention_trouble_does_not_fail_the_commit(vault, problems, monkeypatch):
    def refuse(self, folder, via):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(LocalStorage, "remove", refuse)
    for step in (1, 2, 3):
        save(vault, step)
    assert [info.step for info in vault.list()] == [3, 2, 1] and "clean-up" in problems[0]


def test_foreign_names_are_left_alone(vault, tmp_path):
    path = save(vault, 1)
    folder = tmp_path / "checkpoints"
    os.symlink(path, folder / "step-00000009")
    (folder / "step-00000008").write_text("not a folder")
    for name in ("step-7", "step-00000007.bak", "step-0000000x", "notes", "step-00000006.tmp-", "step-000000005"):
        (folder / name).mkdir()
    before = set(os.listdir(folder))
    assert [info.step for info in vault.list()] == [1] and vault.latest_intact().step == 1
    for step in (2, 3):
        save(vault, step)
    assert set(os.listdir(folder)) == before - {"step-00000001"} | {"step-00000002", "step-00000003"}
    shutil.move(folder / "step-00000003", folder / "step-00000033")
    assert vault.list()[0].problem.endswith("holds step 3; the folder was renamed")
    assert vault.latest_intact().step == 2
    with pytest.raises(ValueError, match="token"):
        vault.writer(1, "../x")


@pytest.mark.parametrize("keep_last", [1, 2])
def test_reading_while_committing(tmp_path, problems, keep_last):
    vault = Vault(tmp_path, keep_last=keep_last, on_problem=problems.append)
    save(vault, 1)
    stop, failures, looks = threading.Event(), [], []

    def watch():
        newest, reader = 1, Vault(tmp_path, on_problem=failures.append)
        while not stop.is_set():
            infos = reader.list()
            found = reader.latest_intact(deep=True)
            if not infos or any(info.intact is False for info in infos) or found is None or found.step < newest:
                failures.append((infos, found, newest))
                return
            value = found.read("model/b")
            if not torch.equal(value, torch.full(SHAPE, float(value[0, 0]))):
                failures.append(value)
            newest = found.step
            found.close()
            looks.append(newest)

    watchers = [threading.Thread(target=watch) for _ in range(2)]
    for watcher in watchers:
        watcher.start()
    for step in range(2, 40):
        save(vault, step)
        save(vault, step, token="again", value=step + 100)
    stop.set()
    for watcher in watchers:
        watcher.join()
    assert not failures and not problems and len(looks) > 5
