"""``planaria data inspect``: what lies at a path, and what is wrong with it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from planaria.commands.failures import FAILED, UsageError
from planaria.config import ColumnsConfig, DataConfig
from planaria.observe.text import quantity

if TYPE_CHECKING:
    from rich.console import Console

    from planaria.data.inspect import Findings

MOST_PROBLEMS = 50
"""Kinds of trouble that the terminal shows."""


def inspect(
    path: str,
    html: str | None,
    format: str,
    columns: Sequence[str],
    image_root: str | None,
    cache_dir: str | None,
    check: int,
    show: int,
) -> int:
    """Print what is found at ``path``, write a page if asked; 1 if a run could not use it."""
    from rich.console import Console
    from rich.progress import Progress

    from planaria.data.inspect import inspect as look

    config = config_of(path, format, columns, image_root, cache_dir)
    console = Console()
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, about headers of pictures that it reads all the same
        task = bar.add_task("reading samples", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        found = look(path, config, check or None, show, progress)
    usable = found.usable(config.max_bad_fraction)
    verdict = verdict_of(found, config.max_bad_fraction)
    _print(console, found, verdict, usable)
    if html is not None:
        from planaria.data.inspect_page import page

        try:
            Path(html).write_text(page(found, headline(found), verdict, usable), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--html {html}: cannot be written ({error.strerror}); name another file") from None
        console.print(f"Page: {html}", highlight=False, soft_wrap=True, markup=False)
    return 0 if usable else FAILED


def config_of(
    path: str, format: str, columns: Sequence[str], image_root: str | None, cache_dir: str | None
) -> DataConfig:
    """The ``data`` section for these options.

    Raises:
        UsageError: an unknown format or role of a column.
    """
    roles: dict[str, str] = {}
    for pair in columns:
        role, equals, name = pair.partition("=")
        if not equals or not name or role not in ColumnsConfig.model_fields:
            known = ", ".join(ColumnsConfig.model_fields)
            raise UsageError(f"--column {pair}: give ROLE=NAME, where ROLE is one of {known}")
        roles[role] = name
    tree: dict[str, Any] = {"source": "files", "path": path, "format": format, "columns": roles}
    tree |= {"image_root": image_root, "cache_dir": cache_dir}
    try:
        return DataConfig.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"--{'-'.join(map(str, first['loc']))}: {first['input']!r}: {first['msg']}") from None


def headline(found: Findings) -> list[tuple[str, str]]:
    """The first figures, as text."""
    figures = [
        ("format", found.format or "unknown"),
        ("samples", f"{found.samples:,}"),
        ("files", f"{len(found.files):,}"),
        ("size", f"{quantity(found.bytes)}B"),
        ("checked", f"{found.checked:,}"),
        ("damaged", f"{found.bad:,}"),
    ]
    if found.pictures:
        figures.append(("pictures per sample", _span(found.pictures)))
        figures.append(("questions per sample", _span(found.turns)))
    return figures


def _span(counts: dict[int, int]) -> str:
    least, most = min(counts), max(counts)
    return str(least) if least == most else f"{least} to {most}"


def verdict_of(found: Findings, limit: float) -> str:
    """One sentence: whether a run could use it."""
    if found.errors:
        return f"Cannot be used: {len(found.errors)} problem(s) with its files."
    if not found.samples:
        return "Cannot be used: there are no samples."
    whole = f"all {found.samples:,} samples" if found.checked == found.samples else f"{found.checked:,} samples checked"
    if not found.bad:
        return f"Sound: {whole} can be used."
    told = f"{found.bad:,} of {whole} are damaged ({found.bad / max(1, found.checked):.2%})"
    if not found.usable(limit):
        return f"Cannot be used: {told}, over data.max_bad_fraction={limit:g}."
    return f"Usable: {told}; they will be skipped."


def _print(console: Console, found: Findings, verdict: str, usable: bool) -> None:
    from rich.markup import escape
    from rich.table import Table

    from planaria.data.inspect import quantiles
    from planaria.data.inspect_page import HEADS

    console.print(escape(found.path), style="bold", highlight=False, soft_wrap=True)
    console.print(", ".join(f"{name} {value}" for name, value in headline(found)), highlight=False, markup=False)
    if found.columns:
        table = Table("column", "holds", "used as", box=None, pad_edge=False)
        for name, kind, role in found.columns:
            table.add_row(escape(name), kind, role)
        console.print(table)
    if found.spreads:
        table = Table("", *HEADS, box=None, pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"
        for name, values in found.spreads.items():
            table.add_row(name, *(f"{value:,}" for value in quantiles(values)))
        console.print(table)
    problems = [(None, problem) for problem in found.errors]
    problems += [(problem.count, problem) for problem in found.skipped]  # type: ignore[misc]
    for count, problem in problems[:MOST_PROBLEMS]:
        often = "" if count in (None, 1) else f"{count:,} times, first "
        console.print(f"  {often}{problem.where}: {problem.what}", highlight=False, markup=False, soft_wrap=True)
    if len(problems) > MOST_PROBLEMS:
        console.print(f"  and {len(problems) - MOST_PROBLEMS} more kinds; --html shows all", highlight=False)
    console.print(verdict, style="green" if usable else "bold red", highlight=False, markup=False)
