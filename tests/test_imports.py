"""Planner and policies stay pure: importing them loads neither torch nor Ray."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    "module", ["planaria.config", "planaria.layout", "planaria.planner.plan", "planaria.control.policies"]
)
def test_pure_modules(module):
    code = f"import sys, {module}; print(sorted({{'torch', 'ray', 'transformers', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "platform", capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
