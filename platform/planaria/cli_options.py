"""What the commands have in common: arguments, help, and how they end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

HELP = {"help_option_names": ["-h", "--help"]}

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="Job file (YAML).", show_default=False)]
RunDir = Annotated[
    str, typer.Argument(metavar="RUN_DIR", help="Run directory: the job's storage and name.", show_default=False)
]
VaultDir = Annotated[
    str,
    typer.Argument(
        metavar="RUN_DIR",
        help="Run directory: the job's storage and name; or s3://bucket/prefix/name.",
        show_default=False,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the job file; may be repeated."),
]


def finish(action: Callable[[], int]) -> None:
    """Run a command and exit with its code."""
    from planaria.commands.failures import guarded

    raise typer.Exit(guarded(action))
