"""Start of every script here: find the package, installed or beside this folder, and run one of its commands."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path


def find_package() -> str | None:
    """Make ``planaria`` importable; its folder where it is not installed, for a cluster that has to be sent it."""
    if importlib.util.find_spec("planaria") is not None:
        return None
    source_root = Path(__file__).resolve().parents[1] / "platform"
    if not (source_root / "planaria" / "__init__.py").is_file():
        sys.exit(f"planaria is neither installed nor in {source_root}; install it with: pip install .")
    sys.path.insert(0, str(source_root))
    # Processes that this one starts find it there, too; those of a cluster are sent the package.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(source_root), os.environ.get("PYTHONPATH")]))
    return str(source_root / "planaria")


def run(command: str) -> None:
    """Run ``planaria COMMAND`` with this process's arguments; never returns."""
    package = find_package()

    from planaria.cli import Entry, run_command

    run_command(command, sys.argv[1:], f"python {sys.argv[0]}", Entry(package))
