"""The ``planaria data`` commands. Thin, like :mod:`planaria.cli`."""

from __future__ import annotations

from typing import Annotated

import typer

from planaria.cli_options import HELP, finish

data = typer.Typer(help="Look at training data.", no_args_is_help=True, context_settings=HELP)


@data.callback()
def group() -> None:
    """Look at training data."""


@data.command("inspect")
def data_inspect(
    path: Annotated[
        str,
        typer.Argument(metavar="PATH", help="File, folder or glob, local or s3://bucket/prefix.", show_default=False),
    ],
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="Also write a page with the first samples.")
    ] = None,
    format: Annotated[
        str, typer.Option("--format", help="webdataset, parquet, hf, mds, llava, or auto: told from the names.")
    ] = "auto",
    column: Annotated[
        list[str] | None,
        typer.Option(
            "--column",
            metavar="ROLE=NAME",
            help="What a column is: image, text, prompt, conversation or key. May be repeated.",
        ),
    ] = None,
    image_root: Annotated[
        str | None, typer.Option("--image-root", metavar="PATH", help="Folder that paths of pictures start from.")
    ] = None,
    cache_dir: Annotated[
        str | None, typer.Option("--cache-dir", metavar="PATH", help="Folder for copies of remote and unpacked files.")
    ] = None,
    check: Annotated[
        int, typer.Option("--check", min=0, help="Samples to read, evenly spaced over the set; 0: all.")
    ] = 10_000,
    show: Annotated[int, typer.Option("--show", min=0, help="Samples on the page.")] = 24,
) -> None:
    """Show format, counts, columns and sizes of a data set, its first samples, and every problem found.

    Exit code: 0 a run could use it, 1 it could not, 2 wrong input.

    Example: planaria data inspect 's3://bucket/train-*.tar' --html data.html
    """

    def action() -> int:
        from planaria.commands.data_inspect import inspect

        return inspect(path, html, format, column or [], image_root, cache_dir, check, show)

    finish(action)


@data.command("audit")
def data_audit(
    run_dir: Annotated[
        str, typer.Argument(metavar="RUN", help="Run directory: the job's storage and name.", show_default=False)
    ],
    samples: Annotated[
        int | None, typer.Option("--samples", min=1, help="Size of the data set, where the run did not record it.")
    ] = None,
) -> None:
    """Compare what every step consumed, as its ranks told, with what seed and step say it should have.

    Exit code: 0 every sample exactly once per epoch, 1 not so or not on record, 2 wrong input.

    Example: planaria data audit runs/emoji
    """

    def action() -> int:
        from planaria.commands.data_audit import audit

        return audit(run_dir, samples)

    finish(action)
