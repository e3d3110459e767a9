"""The source root is called ``platform``; the standard library's module of that name must stay reachable."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROBE = "import platform; print(platform.python_version()); print(platform.__file__)"


def probe(cwd: Path, *arguments: str, **env: str) -> None:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=clean | env, capture_output=True, text=True, check=True
    )
    version, file = done.stdout.splitlines()
    assert version == ".".join(map(str, sys.version_info[:3]))
    assert not Path(file).is_relative_to(cwd)


def test_source_root_is_no_package():
    assert (ROOT / "platform/planaria/__init__.py").is_file()
    assert not (ROOT / "platform/__init__.py").exists()


def test_under_pytest():
    import platform

    assert platform.python_implementation() == "CPython"
    assert not Path(platform.__file__).is_relative_to(ROOT)


def test_from_the_repository_root():
    probe(ROOT, "-c", PROBE)  # sys.path[0] is ""


@pytest.fixture
def working_dir(tmp_path):
    """What Ray unpacks on a node for ``ray job submit --working-dir .``."""
    shutil.copytree(ROOT / "platform", tmp_path / "platform", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_in_a_job_working_directory(working_dir):
    probe(working_dir, "-c", PROBE)
    probe(working_dir, "-c", PROBE, PYTHONPATH=str(working_dir))  # as Ray starts its workers


def test_in_a_job_script(working_dir):
    script = working_dir / "probe.py"
    script.write_text(PROBE)
    probe(working_dir, str(script))  # sys.path[0] is the script's folder


def test_package_is_importable_beside_it(working_dir):
    code = f"import planaria, sys; print(planaria.__file__, file=sys.stderr); {PROBE}"
    probe(working_dir, "-c", code, PYTHONPATH=str(working_dir / "platform"))
