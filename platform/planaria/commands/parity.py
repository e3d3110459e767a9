"""``planaria parity``: families of models beside one process, on every layout."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

from planaria.commands.failures import FAILED, UsageError
from planaria.parity.cell import Cell, Oracles, measure
from planaria.parity.ranks import RankPool
from planaria.parity.report import notes, page, read, shown, terminal_table, write
from planaria.parity.table import FAMILIES, VARIANTS, Family, Variant

Named = TypeVar("Named", Family, Variant)


def chosen(option: str, patterns: str | None, known: Sequence[Named]) -> list[Named]:
    """Those of ``known`` whose name matches one of the comma-separated shell patterns; all without patterns.

    Raises:
        UsageError: a pattern that matches none.
    """
    if patterns is None:
        return list(known)
    wanted = [pattern.strip() for pattern in patterns.split(";" if ";" in patterns else ",") if pattern.strip()]
    for pattern in wanted:
        if not any(fnmatchcase(one.name, pattern) for one in known):
            raise UsageError(f"{option} {pattern}: matches none of {'; '.join(one.name for one in known)}")
    return [one for one in known if any(fnmatchcase(one.name, pattern) for pattern in wanted)]


def parity(families: str | None, layouts: str | None, markdown: str | None, json_file: str | None, resume: bool) -> int:
    """Measure the chosen cells and show them; 1 if one failed."""
    import torch
    from rich.console import Console

    from planaria.observe.view import is_plain

    if resume and json_file is None:
        raise UsageError("--resume needs --json, the file of the run to go on with")
    rows, columns = chosen("--families", families, FAMILIES), chosen("--layouts", layouts, VARIANTS)
    done = _passed(json_file) if resume and json_file is not None else {}
    torch.set_num_threads(1)
    console = Console(highlight=False)
    settings = _settings()
    cells: dict[tuple[str, str], Cell] = {}
    oracles = Oracles()
    wanted = [(family, variant) for family in rows for variant in columns]
    pool: RankPool | None = None
    try:
        for family, variant in wanted:
            key = family.name, variant.name
            if key not in done:
                pool = pool or RankPool(max(variant.layout.world for _, variant in wanted))
                try:
                    done[key] = measure(pool, oracles, family, variant)
                except EOFError:
                    done[key] = Cell(*key, broken="a rank died")
                    pool.close()
                    pool = None
            cells[key] = done[key]
            console.print(f"{family.name:24} {variant.name:28} {shown(cells[key]):>14} {cells[key].seconds:6.1f} s")
            if json_file is not None:
                write(Path(json_file), _in_order(done), settings)
    finally:
        if pool is not None:
            pool.close()
    console.print()
    console.print(terminal_table(list(cells.values()), is_plain(console)))
    for line in notes(cells.values()):
        console.print(line, markup=False)
    if markdown is not None:
        Path(markdown).parent.mkdir(parents=True, exist_ok=True)
        Path(markdown).write_text(page(_in_order(done), settings), encoding="utf-8")
    return FAILED if any(cell.failed for cell in cells.values()) else 0


def _passed(json_file: str) -> dict[tuple[str, str], Cell]:
    try:
        return {(cell.family, cell.variant): cell for cell in read(Path(json_file)) if cell.passed}
    except ValueError as error:
        raise UsageError(f"--json {error}") from None


def _in_order(cells: dict[tuple[str, str], Cell]) -> list[Cell]:
    """As the lists of families and variants have them; what they no longer name is left out."""
    keys = [(family.name, variant.name) for family in FAMILIES for variant in VARIANTS]
    return [cells[key] for key in keys if key in cells]


def _settings() -> str:
    import torch
    import transformers

    threads = os.cpu_count()
    return f"torch {torch.__version__}, transformers {transformers.__version__}, gloo, {threads} CPU cores."
