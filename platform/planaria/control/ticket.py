"""What identifies one submission of a job, over all lives of its controller."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass

CONTROLLER = "controller"
"""Name of the controller's actor in the namespace of its run."""
PREFIX = "planaria-"
"""How all namespaces of this platform begin."""


@dataclass(frozen=True)
class Ticket:
    """Made by the driver, kept by Ray with the controller's constructor arguments."""

    run_dir: str
    run_id: str
    secret: str
    """Admits the processes of this run to each other."""

    @classmethod
    def draw(cls, run_dir: str) -> Ticket:
        """For a new submission."""
        return cls(run_dir, secrets.token_hex(4), secrets.token_hex(16))

    @property
    def namespace(self) -> str:
        """Ray namespace of this submission's actors."""
        return prefix(self.run_dir) + self.run_id


def prefix(run_dir: str) -> str:
    """How the namespaces of all submissions into one run directory begin."""
    return f"{PREFIX}{hashlib.sha256(run_dir.encode()).hexdigest()[:12]}-"
