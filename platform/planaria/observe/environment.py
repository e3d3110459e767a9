"""What a job ran on, for its record: versions and the controller's machine. No variables: they may hold secrets."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

PACKAGES = ("ray", "torch", "transformers", "deepspeed", "peft", "numpy", "pyarrow", "pillow")


def environment() -> dict[str, Any]:
    """Versions and machine as plain values; a package that is not installed is left out."""
    from planaria import __version__

    versions = {"planaria": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    machine = {
        "host": platform.node(),
        "system": platform.platform(),
        "processor": platform.machine(),
        "cpus": os.cpu_count(),
    }
    return {"versions": versions, "controller": machine}
