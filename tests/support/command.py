"""``jobs/train.py`` as a process of its own, as users run it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import yaml

from planaria.config import JobConfig

ROOT = Path(__file__).resolve().parents[2]


class Command:
    """Trains ``job`` on the cluster at ``address``; what it prints goes to a file beside its run directory.

    Args:
        prefix: what starts the command, e.g. in a network namespace.
        environment: more variables for it.
    """

    def __init__(
        self, job: JobConfig, address: str, prefix: Sequence[str] = (), environment: dict[str, str] | None = None
    ) -> None:
        folder = Path(job.storage)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{job.name}.yaml"
        file.write_text(yaml.safe_dump(job.model_dump(mode="json")), encoding="utf-8")
        self.run_dir = folder / job.name
        self._log = folder / f"{job.name}.log"
        variables = {"PYTHONPATH": str(ROOT / "platform"), "RAY_ADDRESS": address}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, str(ROOT / "jobs" / "train.py"), str(file)],
                env=os.environ | variables | (environment or {}),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    @property
    def ended(self) -> bool:
        """Whether it runs no more."""
        return self.process.poll() is not None

    @property
    def output(self) -> str:
        """What it has printed."""
        return self._log.read_text(errors="replace")

    def stop(self, limit_s: float = 90) -> int:
        """Ask for an end at the next step boundary; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(limit_s)

    def __enter__(self) -> Command:
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if not self.ended:
            self.process.kill()
            self.process.wait()
