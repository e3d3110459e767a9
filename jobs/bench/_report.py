"""What every benchmark reports, and how: one JSON file, and tables drawn from it on a terminal or in Markdown."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table as RichTable

PACKAGES = ("planaria", "ray", "torch", "transformers")
NOTHING = "-"


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of some measurements."""

    median: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        if self.low == self.high:
            return number(self.median)
        return f"{number(self.median)} ({number(self.low)} to {number(self.high)})"


def spread(values: Iterable[float | None]) -> Spread | None:
    """Spread of the values that exist; None if there are none."""
    found = [value for value in values if value is not None]
    return Spread(statistics.median(found), min(found), max(found), len(found)) if found else None


def ratio(peer: Spread | None, ours: Spread | None) -> float | None:
    """How many times longer the peer takes, by the medians; None where either is missing."""
    return peer.median / ours.median if peer is not None and ours is not None and ours.median > 0 else None


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if float(value).is_integer():
        return str(int(value))
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


@dataclass(frozen=True)
class Table:
    """Text in rows and columns; the first column names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"table {self.title!r}: row {list(row)} does not fill the columns {list(self.columns)}"
                )

    def numeric(self, column: int) -> bool:
        """Whether a column holds numbers (or nothing), to be aligned on the right."""
        return all(row[column][:1].isdigit() or row[column] == NOTHING for row in self.rows)


@dataclass(frozen=True)
class Report:
    """One benchmark's result."""

    name: str
    title: str
    about: str
    """What was measured, for a reader who does not know the benchmark."""
    machine: dict[str, Any]
    versions: dict[str, str]
    settings: dict[str, Any]
    rows: list[dict[str, Any]]
    """Single measurements, absent contenders (with their reason) included."""
    figures: dict[str, float]
    tables: list[Table] = field(default_factory=list)

    def write(self, path: str | Path) -> None:
        """Write the JSON file, whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(path.name + ".part")
        draft.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        draft.replace(path)

    @classmethod
    def read(cls, path: str | Path) -> Report:
        """Read and check a JSON file.

        Raises:
            ValueError: it is not a report; the message names the file and what is wrong.
        """
        try:
            tree = json.loads(Path(path).read_text(encoding="utf-8"))
            check(tree)
            return cls(**{**tree, "tables": [Table(**table) for table in tree["tables"]]})
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}: not a benchmark report: {error}") from None

    def print(self, console: Console | None = None) -> None:
        """Draw the tables on the terminal."""
        console = console or Console()
        for table in self.tables:
            drawn = RichTable(title=table.title, title_justify="left")
            for index, column in enumerate(table.columns):
                drawn.add_column(column, justify="right" if table.numeric(index) else "left", overflow="fold")
            for row in table.rows:
                drawn.add_row(*row)
            console.print(drawn)
        console.print("Figures", style="bold")
        for name, value in self.figures.items():
            console.print(f"  {name} = {number(value)}")

    def markdown(self) -> str:
        """A section of ``docs/benchmarks.md``."""
        machine = self.machine
        lines = [
            f"## {self.title}",
            "",
            self.about,
            "",
            f"Machine: {machine['cores']} cores ({machine['cpu']}), {machine['memory_gib']} GiB memory, "
            f"{machine['accelerator']}. Measured {machine['date']}. "
            f"Versions: {', '.join(f'{name} {version}' for name, version in self.versions.items())}.",
            "",
        ]
        for table in [figures_table(self), *self.tables]:
            lines += [f"**{table.title}**", "", *_markdown(table), ""]
        return "\n".join(lines)


def check(tree: Any) -> None:
    """Raise ValueError where ``tree`` lacks what every report holds."""
    kinds = {"machine": dict, "versions": dict, "settings": dict, "rows": list, "figures": dict, "tables": list}
    for key, kind in kinds.items():
        if not isinstance(tree, dict) or not isinstance(tree.get(key), kind):
            raise ValueError(f"{key} is missing or no {kind.__name__}")
    for name, value in tree["figures"].items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"figure {name} is {value!r}, not a number")


def figures_table(report: Report) -> Table:
    """The figures as a table."""
    return Table("Figures", ("figure", "value"), [(name, number(value)) for name, value in report.figures.items()])


def machine(date: str) -> dict[str, Any]:
    """What the measurements depend on; no name of the machine, no paths."""
    import torch

    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "no accelerator",
        "system": f"{platform.system()} {platform.machine()}",
        "date": date,
    }


def versions() -> dict[str, str]:
    """Python and the packages that matter."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            import planaria

            found[name] = planaria.__version__ if name == "planaria" else "absent"
    return found


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _markdown(table: Table) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    marks = ["---:" if table.numeric(index) else "---" for index in range(len(table.columns))]
    return [line(table.columns), line(marks), *(line(row) for row in table.rows)]
