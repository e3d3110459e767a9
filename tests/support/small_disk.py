"""A file system that is soon full."""

from __future__ import annotations

import contextlib
import gc
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """A file system in memory of ``size`` (as ``mount`` spells it) at ``folder``; skips where that is not allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    yield folder
    gc.collect()  # whatever is still mapped would keep it busy
    subprocess.run(["umount", str(folder)], check=True)
