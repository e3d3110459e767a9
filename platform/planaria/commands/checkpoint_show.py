"""``planaria checkpoint show``: what a checkpoint holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from planaria.commands.checkpoint import pick, place_of
from planaria.commands.failures import FAILED, UsageError, complain

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from planaria.state.checkpoint import Checkpoint


@dataclass(frozen=True)
class Row:
    """One tensor; ``bytes`` counts every stored slice."""

    name: str
    shape: list[int]
    dtype: str
    slices: int
    bytes: int


@dataclass(frozen=True)
class Total:
    """Sums over the tensors of one kind, or the slices of one file."""

    name: str
    tensors: int
    elements: int
    bytes: int


def show(run_dir: str, step: int | None, pattern: str | None, as_json: bool) -> int:
    """Print the tensors of a checkpoint that match ``pattern``, totals by kind, and its files; 1 if it is damaged."""
    from planaria.state.errors import CheckpointDamaged
    from planaria.state.vault import Vault

    vault = Vault(place_of(run_dir), on_problem=lambda _: None)
    number = pick(vault, run_dir, step)
    try:
        with vault.at(number) as checkpoint:
            found = rows(checkpoint, pattern)
            if not found:
                raise UsageError(f"{checkpoint.path}: no tensor matches {pattern!r}; patterns are like 'model/*norm*'")
            if as_json:
                _print_json(checkpoint, found)
            else:
                _print_tables(checkpoint, found)
    except CheckpointDamaged as error:
        complain(f"{error}\nsee planaria checkpoint verify {run_dir}")
        return FAILED
    return 0


def rows(checkpoint: Checkpoint, pattern: str | None = None) -> list[Row]:
    """Tensors whose name matches the glob ``pattern``; without ``*``, ``?`` or ``[``, those that contain it."""
    if pattern is not None and not set("*?[") & set(pattern):
        pattern = f"*{pattern}*"
    return [
        Row(name, list(slices[0].global_shape), slices[0].dtype, len(slices), sum(item.nbytes for item in slices))
        for name, slices in checkpoint.index.tensors.items()
        if pattern is None or fnmatchcase(name, pattern)
    ]


def kinds(checkpoint: Checkpoint) -> list[Total]:
    """Totals of the model and of every kind of optimizer state."""
    import math

    sums: dict[str, list[int]] = {}
    for row in rows(checkpoint):
        kind, _, rest = row.name.partition("/")
        if kind != "model":
            kind += "/" + rest.partition("/")[0]
        total = sums.setdefault(kind, [0, 0, 0])
        for at, value in enumerate((1, math.prod(row.shape), row.bytes)):
            total[at] += value
    return [Total(kind, *total) for kind, total in sums.items()]


def files(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Name, number of slices and bytes of data of every shard file."""
    return [
        {"name": name, "slices": len(slices), "bytes": sum(item.nbytes for item in slices)}
        for name, slices in sorted(checkpoint.index.by_file().items())
    ]


def _print_json(checkpoint: Checkpoint, found: list[Row]) -> None:
    import json

    tree = {
        "step": checkpoint.step,
        "path": checkpoint.path,
        "meta": dict(checkpoint.meta),
        "totals": [asdict(total) for total in kinds(checkpoint)],
        "files": files(checkpoint),
        "tensors": [asdict(row) for row in found],
    }
    print(json.dumps(tree, indent=2))


def _print_tables(checkpoint: Checkpoint, found: list[Row]) -> None:
    from rich.console import Console
    from rich.text import Text

    from planaria.observe.text import quantity
    from planaria.observe.view import encodable

    console = Console(highlight=False)

    def say(line: str, style: str = "") -> None:
        console.print(Text(encodable(line, console.encoding), style=style))

    job = checkpoint.meta.get("job") or {}
    say(f"{checkpoint.path}", "bold")
    say(f"step {checkpoint.step}, layout {checkpoint.meta.get('layout', '-')}, job {job.get('name', '-')}")
    if origin := checkpoint.meta.get("imported"):
        say(f"imported from {origin.get('from', '-')}")
    table = _table(console, "tensor", "shape", "dtype", "slices", "bytes")
    for row in found:
        _add(table, console, row.name, "x".join(map(str, row.shape)) or "-", row.dtype, row.slices, quantity(row.bytes))
    console.print()
    console.print(table)
    totals = _table(console, "kind", "tensors", "elements", "bytes")
    for total in kinds(checkpoint):
        _add(totals, console, total.name, total.tensors, quantity(total.elements), quantity(total.bytes))
    console.print()
    console.print(totals)
    held = _table(console, "file", "slices", "bytes")
    for file in files(checkpoint):
        _add(held, console, file["name"], file["slices"], quantity(file["bytes"]))
    console.print()
    console.print(held)


def _table(console: Console, first: str, *others: str) -> Table:
    from rich import box
    from rich.table import Table

    from planaria.observe.view import is_plain

    table = Table(box=box.ASCII2 if is_plain(console) else box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="left" if name in ("shape", "dtype") else "right", no_wrap=True)
    return table


def _add(table: Table, console: Console, *cells: object) -> None:
    from rich.text import Text

    from planaria.observe.view import encodable

    table.add_row(*(Text(encodable(str(cell), console.encoding)) for cell in cells))
