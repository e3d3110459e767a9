"""A bare ``torchrun`` script: one process per rank on one machine, nothing around it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from _peers.work import Work


def settings() -> dict[str, Any]:
    """What is set, for the report."""
    return {
        "launch": "torchrun --standalone --nproc-per-node=N",
        "model": "the same class, FSDP2 over the same units, AdamW, gradient norm clipped",
        "data": "the same batches, built ahead by one DataLoader worker per rank (prefetch_factor=2)",
        "checkpoint": "none",
        "threads": 1,
    }


def run(work: Work) -> None:
    """Train to the end.

    Raises:
        RuntimeError: it failed.
    """
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={work.workers or work.nodes}",
    ]
    code = subprocess.run(
        [*command, "-m", "_peers.bare_script", work.as_json()], env=os.environ, check=False
    ).returncode
    if code:
        raise RuntimeError(f"torchrun ended with exit code {code}")
