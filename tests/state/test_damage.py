"""Every way a checkpoint breaks: it is named, skipped, and never costs an intact one."""

import errno
import os
import shutil
import subprocess
import threading

import pytest
import torch

from planaria.state.boxes import Box, shard_rows
from planaria.state.errors import CheckpointDamaged, CheckpointError
from planaria.state.local_storage import LocalStorage
from planaria.state.vault import Vault
from planaria.state.writer import Piece

SHAPE = (6, 4)
TENSORS = ("model/a", "model/b", "optim/exp_avg/a")


def state(step: int) -> dict[str, torch.Tensor]:
    return {name: torch.full(SHAPE, float(step * 10 + i)) for i, name in enumerate(TENSORS)}


def save(vault: Vault, step: int, token: str = "t", value: int | None = None) -> str:
    tensors = state(step if value is None else value)
    slices = []
    for rank in range(2):
        box = shard_rows(SHAPE, rank, 2)
        pieces = [Piece(n, SHAPE, box, t[box.relative_to(Box.whole(SHAPE))]) for n, t in tensors.items()]
        slices += vault.writer(step, token).write_shard(rank, pieces)
    return vault.writer(step, token).commit(slices, {"step": step})


@pytest.fixture
def problems():
    return []


@pytest.fixture
def vault(tmp_path, problems):
    return Vault(tmp_path, keep_last=2, on_problem=problems.append)


def flip(path: str, position: int) -> None:
    with open(path, "r+b") as out:
        out.seek(position, 2 if position < 0 else 0)
        byte = out.read(1)
        out.seek(-1, 1)
        out.write(bytes([byte[0] ^ 1]))


def truncate(path: str) -> None:
    os.truncate(path, os.path.getsize(path) - 1)


SHARD = "shard-00001.safetensors"
SHALLOW = {
    "truncated shard": (SHARD, truncate),
    "empty shard": (SHARD, lambda path: os.truncate(path, 0)),
    "grown shard": (SHARD, lambda path: os.truncate(path, os.path.getsize(path) + 1)),
    "missing shard": (SHARD, os.remove),
    "shard is a folder": (SHARD, lambda path: (os.remove(path), os.mkdir(path))),
    "damaged shard header": (SHARD, lambda path: flip(path, 9)),
    "damaged header length": (SHARD, lambda path: flip(path, 1)),
    "shard of another rank": (SHARD, lambda path: shutil.copy(path.replace("1.", "0."), path)),
    "truncated manifest": ("manifest.json", truncate),
    "empty manifest": ("manifest.json", lambda path: os.truncate(path, 0)),
    "half a manifest": ("manifest.json", lambda path: os.truncate(path, os.path.getsize(path) // 2)),
    "edited manifest": ("manifest.json", lambda path: edit(path, b'{"step":2}', b'{"step":3}')),
    "edited checksum": ("manifest.json", lambda path: flip(path, 15)),
    "missing manifest": ("manifest.json", os.remove),
}


def edit(path: str, old: bytes, new: bytes) -> None:
    with open(path, "rb") as file:
        raw = file.read()
    assert old in raw
    with open(path, "wb") as file:
        file.write(raw.replace(old, new))


@pytest.mark.parametrize("case", SHALLOW)
def test_damage_is_named_and_skipped(vault, problems, case):
    file, harm = SHALLOW[case]
    save(vault, 1)
    path = save(vault, 2)
    harm(f"{path}/{file}")
    found = vault.latest_intact()
    assert found.step == 1 and torch.equal(found.read("model/a"), state(1)["model/a"])
    if case == "shard of another rank":
        assert "[3:6,0:4]" in problems[0]
    assert len(problems) == 1 and file in problems[0]
    newer, older = vault.list()
    assert (newer.step, newer.intact, newer.problem) == (2, False, problems[0])
    assert (older.step, older.intact, older.problem) == (1, True, None)
    descriptors = len(os.listdir("/proc/self/fd"))
    vault.list("deep")
    vault.latest_intact().close()
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_every_flipped_byte_of_the_data_is_found(vault, problems):
    save(vault, 1)
    path = f"{save(vault, 2)}/{SHARD}"
    data_bytes = 3 * 3 * 4 * 4
    for position in range(-data_bytes, 0, 7):
        flip(path, position)
        shallow = vault.latest_intact()
        assert shallow.step == 2
        (problem,) = shallow.verify()
        assert SHARD in problem and "[3:6,0:4]" in problem and "checksum" in problem
        assert vault.latest_intact(deep=True).step == 1 and problems == [problem]
        problems.clear()
        flip(path, position)
    assert vault.latest_intact(deep=True).step == 2
    flip(path, -1)
    with pytest.raises(CheckpointDamaged) as caught:
        vault.latest_intact().read("optim/exp_avg/a", Box((3, 0), (1, 1)))
    assert caught.value.file == path and caught.value.slice == "optim/exp_avg/a[3:6,0:4]"


def test_shard_cut_while_open_is_an_error_not_a_crash(vault):
    path = f"{save(vault, 1)}/{SHARD}"
    found = vault.latest_intact()
    truncate(path)
    with pytest.raises(CheckpointDamaged, match="1 bytes too early"):
        found.read("optim/exp_avg/a")


def test_crash_before_commit_is_not_visible(vault, tmp_path):
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


def test_retention_keeps_the_last_intact(vault, problems):
    def steps():
        return [info.step for info in vault.list("names")]

    save(vault, 1)
    two = save(vault, 2)
    flip(f"{two}/{SHARD}", -1)  # a shallow look does not see this
    save(vault, 3)
    assert steps() == [3, 2, 1] and "step-00000002" in problems[0]
    for path in (info.path for info in vault.list() if info.step == 3):
        truncate(f"{path}/manifest.json")
    save(vault, 4)
    assert steps() == [4, 3, 2, 1]
    save(vault, 5)
    assert steps() == [5, 4]
    assert all(info.intact for info in vault.list("deep"))


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
