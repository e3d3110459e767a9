"""The demo, shortened: the fault, the recovery and the return are shown; only the answers are not yet good."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from planaria.observe.record import read_lines


def test_the_demo_loses_a_node_and_ends_on_four(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "planaria.cli", "demo", "--steps", "160", "--keep", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": "platform"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    rows = read_lines(tmp_path / "demo" / "events.jsonl")
    sizes = [len(row["workers"]) for row in rows if row["event"] == "generation"]
    assert sizes == [4, 3, 4], done.stdout + done.stderr
    assert "step 80: killing node" in done.stdout
    short = [line for line in done.stdout.splitlines() if "FELL SHORT" in line]
    assert all("times chance" in line for line in short), done.stdout
    assert done.returncode == (1 if short else 0)
