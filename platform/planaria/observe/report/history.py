"""What the folder of a run holds, read once: torn lines, missing files and earlier submissions included."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from planaria.observe.report.reduce import Floats, Ints

Row = dict[str, Any]
ENDED = ("finished", "stopped", "failed")
NUMBERS = ("time", "loss", "grad_norm", "lr", "step_s", "data_wait_s", "compute_s", "snapshot_s")


@dataclass(frozen=True)
class Steps:
    """Executed steps in the order in which they were recorded, redone ones again; NaN where nothing was written."""

    step: Ints
    generation: Ints
    skipped: Ints
    columns: dict[str, Floats]

    def __len__(self) -> int:
        return len(self.step)

    def __getitem__(self, name: str) -> Floats:
        return self.columns[name]

    def at(self, chosen: Ints) -> Steps:
        """These rows only."""
        columns = {name: column[chosen] for name, column in self.columns.items()}
        return Steps(self.step[chosen], self.generation[chosen], self.skipped[chosen], columns)


@dataclass
class History:
    """All that is known of a run."""

    name: str
    now: float
    """When it was read, as ``time.time()``."""
    events: list[Row] = field(default_factory=list)
    """Rows of ``events.jsonl`` in order; all have ``event`` (str) and ``time`` (float)."""
    steps: Steps = field(default_factory=lambda: _Gathered().steps())
    accounts: list[Row] = field(default_factory=list)
    """Where the wall time had gone, now and then; the last is the newest."""
    ranks: list[Row] = field(default_factory=list)
    """What every rank did, now and then."""
    starts: list[float] = field(default_factory=list)
    """When each submission into this folder began, as ``time.time()``, in order."""
    job: Row = field(default_factory=dict)
    environment: Row = field(default_factory=dict)
    summary: Row | None = None
    """Of the newest submission, if it is over."""
    problems: list[str] = field(default_factory=list)
    """What could not be read, for the reader of the report."""

    @property
    def state(self) -> str:
        """The last state that was entered."""
        states = [str(row.get("to")) for row in self.events if row["event"] == "state"]
        return states[-1] if states else "waiting"

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self.state in ENDED

    @property
    def began(self) -> float:
        """When the first submission began."""
        firsts = [row["time"] for row in self.events[:1]] + self.starts[:1]
        return min(firsts) if firsts else self.now

    @property
    def ended(self) -> float:
        """When the last line was written."""
        times = [row["time"] for row in self.events[-1:]] + [float(at) for at in self.steps["time"][-1:]]
        return max((at for at in times if math.isfinite(at)), default=self.began)

    def kind(self, *names: str) -> list[Row]:
        """The events of these kinds, in order."""
        return [row for row in self.events if row["event"] in names]


def read_history(folder: str | Path, now: float) -> History:
    """Read a run's folder; whatever is missing or torn is left out, and named in ``problems``.

    Args:
        folder: the job's storage and name.
        now: ``time.time()``.
    """
    home = Path(folder)
    history = History(name=home.resolve().name, now=now)
    for tree, name in (("job", "job.json"), ("environment", "environment.json"), ("summary", "summary.json")):
        if (found := _tree(home / name, history.problems)) is not None:
            setattr(history, tree, found)
    history.name = str(history.job.get("name") or history.name)
    for row in _rows(home / "events.jsonl", history.problems):
        if isinstance(row.get("event"), str) and _is_number(row.get("time")):
            history.events.append(row)
    gathered = _Gathered()
    for row in _rows(home / "metrics.jsonl", history.problems):
        gathered.take(row)
    history.steps = gathered.steps()
    history.accounts = [row for row in _rows(home / "goodput.jsonl", history.problems, wanted=False) if _account(row)]
    history.ranks = [row for row in _rows(home / "ranks.jsonl", history.problems, wanted=False) if _told(row)]
    history.starts = _starts(list(_rows(home / "journal.jsonl", history.problems, wanted=False)), history.events)
    if history.summary is not None and not history.over:
        history.summary = None  # of the submission before
    closing = (history.summary or {}).get("goodput")
    if isinstance(closing, dict) and _account(closing):
        history.accounts.append(closing)
    return history


def _starts(journal: Sequence[Row], events: Sequence[Row]) -> list[float]:
    """When each submission began: as the journal says, else by the generations, which each counts from 1."""
    known: dict[str, float] = {}
    for row in journal:
        if row.get("t") == "run" and _is_number(row.get("time")):
            known.setdefault(str(row.get("run")), float(row["time"]))
    if known:
        return sorted(known.values())
    firsts = [row["time"] for row in events if row["event"] == "generation" and row.get("gen") == 1]
    return [row["time"] for row in events[:1]] + firsts[1:]


class _Gathered:
    """Columns that grow: a million dictionaries would not fit where a million numbers do."""

    def __init__(self) -> None:
        self._whole = {name: array("q") for name in ("step", "gen", "skipped")}
        self._numbers = {name: array("d") for name in NUMBERS}

    def take(self, row: Row) -> None:
        step, generation = row.get("step"), row.get("gen")
        if not isinstance(step, int) or not _is_number(row.get("time")):
            return
        self._whole["step"].append(step)
        self._whole["gen"].append(generation if isinstance(generation, int) else 0)
        self._whole["skipped"].append(bool(row.get("skipped")))
        for name, column in self._numbers.items():
            value = row.get(name)
            column.append(float(value) if isinstance(value, (int, float)) else math.nan)

    def steps(self) -> Steps:
        whole = {name: np.array(column, np.int64) for name, column in self._whole.items()}
        numbers = {name: np.array(column, np.float64) for name, column in self._numbers.items()}
        return Steps(whole["step"], whole["gen"], whole["skipped"], numbers)


def _rows(path: Path, problems: list[str], *, wanted: bool = True) -> Iterator[Row]:
    """Objects of a file of JSON lines, one at a time: it may be larger than memory."""
    torn = 0
    try:
        with path.open("rb") as file:
            for line in file:
                try:
                    row = json.loads(line)
                except ValueError:
                    torn += bool(line.strip())
                    continue
                if isinstance(row, dict):
                    yield row
                else:
                    torn += 1
    except FileNotFoundError:
        if wanted:
            problems.append(f"{path.name} is missing")
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")
    if torn:
        problems.append(f"{path.name}: {torn} torn or foreign line{'s' if torn > 1 else ''} left out")


def _tree(path: Path, problems: list[str]) -> Row | None:
    try:
        tree = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return None
    return tree if isinstance(tree, dict) else None


def _account(row: Row) -> bool:
    return all(_is_number(row.get(name)) for name in ("productive", "wall", "goodput"))


def _told(row: Row) -> bool:
    return isinstance(row.get("ranks"), dict) and _is_number(row.get("time")) and _is_number(row.get("seconds"))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
