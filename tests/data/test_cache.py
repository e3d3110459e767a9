from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from planaria.data.cache import Cache, default_folder
from planaria.data.errors import DataError
from planaria.data.files import File


def file(name: str, version: str = "1") -> File:
    return File(f"s3://bucket/{name}", 100, version)


def cached(cache: Cache, name: str, size: int = 100) -> str:
    with cache.open(file(name), make=lambda f: [name[:1].encode() * size]) as opened:
        assert opened.read() == name[:1].encode() * size
        return opened.name


def test_the_copies_used_longest_ago_are_dropped(tmp_path: Path) -> None:
    cache = Cache(str(tmp_path / "c"), 300)
    names = {name: Path(cached(cache, name)) for name in "abc"}
    for age, name in enumerate("bca"):  # a is used last
        os.utime(names[name], (age, age))
    cached(cache, "a")
    cached(cache, "d", 150)
    assert not names["b"].exists() and not names["c"].exists() and names["a"].exists()
    assert sum(path.stat().st_size for path in (tmp_path / "c").iterdir()) <= 300


def test_a_dropped_copy_stays_readable_for_its_readers(tmp_path: Path) -> None:
    cache = Cache(str(tmp_path), 100)
    with cache.open(file("a"), make=lambda f: [b"a" * 100]) as opened:
        cached(cache, "b")
        assert len(list(tmp_path.iterdir())) == 1 and opened.read() == b"a" * 100


def test_other_versions_and_kinds_are_other_copies(tmp_path: Path) -> None:
    cache = Cache(str(tmp_path), 1000)
    for version, kind in (("1", "copy"), ("2", "copy"), ("1", "index")):
        content = f"{version} {kind}".encode()
        with cache.open(file("a", version), kind, lambda f, content=content: [content]) as opened:
            assert opened.read() == content


def test_too_large_or_interrupted_leaves_nothing(tmp_path: Path) -> None:
    cache = Cache(str(tmp_path), 100)
    with pytest.raises(DataError, match=r"s3://bucket/a: takes more than .*raise data\.cache_gib"):
        cache.open(file("a"), make=lambda f: [b"x" * 60, b"x" * 60])

    def broken(f: File) -> Iterator[bytes]:
        yield b"half"
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        cache.open(file("a"), make=broken)
    assert list(tmp_path.iterdir()) == []
    cached(cache, "a")


def test_what_a_dead_process_left_is_taken_over_or_removed(tmp_path: Path) -> None:
    cache = Cache(str(tmp_path), 1000)
    mine = Path(cached(cache, "a"))
    mine.unlink()
    mine.with_suffix(".part").write_bytes(b"left over, and longer than what is to come" * 9)
    other, held = tmp_path / "other.part", tmp_path / "held.part"
    other.write_bytes(b"left over")
    with open(held, "wb") as working:
        fcntl.flock(working, fcntl.LOCK_EX)
        assert cached(cache, "a") == str(mine)
        assert {path.name for path in tmp_path.iterdir()} == {mine.name, "held.part"}


def test_threads_make_a_copy_once(tmp_path: Path) -> None:
    cache, made, begin = Cache(str(tmp_path), 1000), [], threading.Barrier(8)

    def make(f: File) -> Iterator[bytes]:
        made.append(f)
        yield b"a" * 100

    def use() -> None:
        begin.wait()
        with cache.open(file("a"), make=make) as opened:
            assert opened.read() == b"a" * 100

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


USER = """
import sys
from planaria.data.cache import Cache, default_folder
from planaria.data.files import File
made = 0
def make(file):
    global made
    made += 1
    for at in range(10):
        yield file.path[-1:].encode() * 1000
cache = Cache(sys.argv[1], 25_000)  # two of four fit
print("ready", flush=True)
sys.stdin.readline()
for turn in range(100):
    name = "abcd"[(turn + int(sys.argv[2])) % 4]
    with cache.open(File(f"s3://bucket/{name}", 10_000, "1"), make=make) as opened:
        assert opened.read() == name.encode() * 10_000
print(made)
"""


def test_processes_share_it_while_it_drops(tmp_path: Path) -> None:
    command = [sys.executable, "-c", USER, str(tmp_path)]
    platform, pipe = Path(__file__).parents[2] / "platform", subprocess.PIPE
    users = [subprocess.Popen([*command, str(at)], stdin=pipe, stdout=pipe, text=True, cwd=platform) for at in range(2)]
    for user in users:
        assert user.stdout is not None and user.stdout.readline() == "ready\n"
    for user in users:
        assert user.stdin is not None
        user.stdin.write("go\n")
        user.stdin.flush()
    done = [user.communicate(timeout=60)[0] for user in users]
    assert [user.returncode for user in users] == [0, 0] and all(int(made) > 0 for made in done)
    assert {path.stat().st_size for path in tmp_path.iterdir()} == {10_000}


def test_a_temporary_folder_of_somebody_else_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planaria.data.cache.tempfile.gettempdir", lambda: str(tmp_path))
    cache = Cache(default_folder(), 1000)
    cached(cache, "a")
    other = os.getuid() + 1
    monkeypatch.setattr("planaria.data.cache.os.getuid", lambda: other)
    os.rename(cache.folder, default_folder())
    with pytest.raises(DataError, match=r"belongs to another user; set data\.cache_dir"):
        cached(Cache(default_folder(), 1000), "b")
