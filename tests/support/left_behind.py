"""A temporary folder for Ray, and a check that nothing is left behind: fixtures for tests with real processes."""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

KEPT_BY_OTHERS = ("ray", "pymp-", "torchinductor_")


def _processes() -> set[int]:
    """Living descendants. A grandchild that ended may stay as a zombie until this process ends: it runs no more."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.add(process.pid)
    return found


def _command(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline())[:200]
    return ""


def _pooled(pid: int, before: set[int]) -> bool:
    """Whether it is an idle worker that Ray keeps at hand, of a cluster that is older than the test."""
    with contextlib.suppress(psutil.Error):
        return _command(pid).startswith("ray::IDLE") and psutil.Process(pid).ppid() in before
    return False


def _shared_memory() -> set[str]:
    """Names in shared memory, without those that a process which is no descendant of this one has open: another
    test process makes its own."""
    names = set(os.listdir("/dev/shm"))
    if not names:
        return names
    own = _processes() | {os.getpid()}
    for pid in psutil.pids():
        if pid not in own:
            with contextlib.suppress(OSError):
                names -= set(re.findall(r" /dev/shm/(\S+)", Path(f"/proc/{pid}/maps").read_text()))
    return names


def _listening(apart_from: set[int] | None = None) -> set[int]:
    pids = (_processes() | {os.getpid()}) - (apart_from or set())
    found = set()
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.pid in pids:
            found.add(connection.laddr.port)
    return found


@pytest.fixture
def temp_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of the test's own; short, for Ray's sockets lie in it. ``tmp_path`` stays elsewhere."""
    multiprocessing.util.get_temp_dir()  # this process's own, kept until its end, must not be made in ours
    folder = Path(tempfile.mkdtemp(prefix="pl"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def nothing_left_behind(temp_folder: Path) -> Iterator[None]:
    """Processes, ports, shared memory and temporary files are as many after the test as before."""
    shared_memory, listening, processes = _shared_memory(), _listening(), _processes()
    yield
    deadline = time.monotonic() + 20
    while (
        running := {pid for pid in _processes() - processes if not _pooled(pid, processes)}
    ) or _shared_memory() - shared_memory:
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    left = {pid: _command(pid) for pid in running}
    assert not left, f"processes left running: {left}"
    assert _shared_memory() <= shared_memory
    # Ray's daemons keep their session logs and what they do not clean up when they are killed; torch keeps a cache.
    assert not [path.name for path in temp_folder.iterdir() if not path.name.startswith(KEPT_BY_OTHERS)]
    assert _listening({pid for pid in _processes() if _pooled(pid, processes)}) <= listening
