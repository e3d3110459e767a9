"""``planaria data audit``: proof, from a run's own records, that every sample was consumed once per epoch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planaria.commands.failures import FAILED, UsageError

if TYPE_CHECKING:
    from planaria.data.audit import Audit, Course

MOST_SHOWN = 10


def audit(run_dir: str, samples: int | None) -> int:
    """Print what the ledger of ``run_dir`` proves; 1 if it proves less than all.

    Args:
        run_dir: the job's storage and name.
        samples: size of the data set, for runs that did not record it.

    Raises:
        UsageError: this is no run directory, or it does not say what is needed.
    """
    from planaria.data.audit import audit as compare
    from planaria.observe.record import read_lines

    folder = Path(run_dir)
    ledger = read_lines(folder / "ledger.jsonl")
    if not ledger:
        raise UsageError(f"{run_dir}: holds no ledger.jsonl with steps; give a run directory, i.e. storage and name")
    course = course_of(folder, samples)
    found = compare(ledger, course)
    _print(found, course)
    return 0 if found.proven else FAILED


def course_of(folder: Path, samples: int | None) -> Course:
    """What the run's samples follow from, by its records.

    Raises:
        UsageError: a record is missing or torn.
    """
    from planaria.control.journal import skips
    from planaria.data.audit import Course
    from planaria.observe.record import read_lines

    job = _tree(folder / "job.json")
    if samples is None:
        data = _tree(folder / "environment.json").get("data")
        if data is None:
            raise UsageError(f"{folder}: does not say how many samples its data set has; give --samples N")
        samples = int(data["samples"])
    damaged: Counter[int] = Counter()
    # Redone steps may tell of the same damage again, e.g. to another controller.
    for position, _ in {
        (row["position"], row["attempt"]) for row in read_lines(folder / "events.jsonl") if row["event"] == "bad_sample"
    }:
        damaged[position] += 1
    try:
        return Course(
            samples=samples,
            global_batch=job["train"]["global_batch"],
            seed=job["seed"],
            shuffle=job["data"]["shuffle"],
            windows=skips(read_lines(folder / "journal.jsonl")),
            damaged=damaged,
        )
    except KeyError as error:
        raise UsageError(f"{folder / 'job.json'}: lacks {error}; it was written by another version") from None


def _tree(path: Path) -> Mapping[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read ({error})") from None
    if not isinstance(tree, dict):
        raise UsageError(f"{path}: not a JSON object")
    return tree


def _print(found: Audit, course: Course) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in (
        ("steps", f"{found.steps:,}"),
        ("samples consumed", f"{found.consumed:,} of a data set of {course.samples:,} ({found.epochs:.2f} epochs)"),
        ("executions undone", f"{found.redone:,}"),
        ("substitutes for damaged samples", f"{found.substitutes:,}"),
        ("batches left out", f"{sum(last - first + 1 for first, last in course.windows):,}"),
        ("steps that differ", f"{len(found.differences):,}"),
        ("steps not on record", f"{len(found.unknown):,}"),
    ):
        table.add_row(name, value)
    console.print(table)
    for difference in found.differences[:MOST_SHOWN]:
        console.print(f"step {difference.step}: missed {_some(difference.missed)}; not due {_some(difference.surplus)}")
    if len(found.differences) > MOST_SHOWN:
        console.print(f"and {len(found.differences) - MOST_SHOWN:,} more")
    if found.unknown:
        console.print(f"not on record: steps {_some(found.unknown)}")
    if found.proven:
        console.print("exactly once: every step consumed what seed and step say, nothing twice, nothing missed")
    else:
        console.print("NOT PROVEN" if not found.differences else "NOT EXACTLY ONCE", style="bold red")


def _some(ids: list[int]) -> str:
    if not ids:
        return "nothing known"
    rest = f" and {len(ids) - MOST_SHOWN:,} more" if len(ids) > MOST_SHOWN else ""
    return ", ".join(map(str, ids[:MOST_SHOWN])) + rest
