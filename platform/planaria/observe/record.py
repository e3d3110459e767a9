"""The run directory: events, metrics, the ledger of samples, and the closing summary."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from planaria.data.audit import set_digest

MOST_UNWRITTEN = 16 << 20
RECENT = 40
"""Events that are kept at hand for whoever looks on."""


class RunRecord:
    """Appends JSON lines under ``run_dir``; unbuffered, so a killed run leaves whole lines. A full disk does not
    end the run: lines wait in memory, at most :data:`MOST_UNWRITTEN` bytes per file, until they can be written.

    ``events.jsonl``: what happened and why. ``metrics.jsonl``: one row per executed step (a step that is
    redone after a rollback appears again, with its new generation; the last row counts). ``ledger.jsonl``:
    the ids that each step consumed. ``goodput.jsonl``: now and then, where the wall time has gone so far.
    ``ranks.jsonl``: now and then, what every rank did. ``journal.jsonl``: what a controller that returns must
    know. Numbers that are not finite are null (:func:`finite`).
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir)
        self.path.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, FileIO] = {}
        self._unwritten: dict[str, bytes] = {}
        self.last_event = ""
        self.listener: Callable[[str, Mapping[str, Any]], None] = lambda name, row: None
        """Told (record, row) of every row; must neither fail nor take long."""
        self.recent: deque[tuple[float, str, str]] = deque(maxlen=RECENT)
        """(time, kind, text) of the newest events, oldest first."""

    def job(self, tree: Mapping[str, Any]) -> None:
        """Write ``job.json``: the whole job description, defaults included."""
        self._write("job.json", tree)

    def environment(self, tree: Mapping[str, Any]) -> None:
        """Write ``environment.json``: what the job runs on."""
        self._write("environment.json", tree)

    def event(self, kind: str, text: str, **fields: Any) -> None:
        """Record that ``kind`` happened; ``text`` is the sentence a person reads."""
        self.last_event, now = text, time.time()
        self.recent.append((now, kind, text))
        self._append("events", {"time": now, "event": kind, "text": text, **fields})

    def transition(self, before: str, after: str, cause: str, seconds: float) -> None:
        """Record that the job went from one state, in which it was for so many seconds, to another."""
        row = {"event": "state", "from": before, "to": after, "cause": cause, "seconds": seconds}
        self._append("events", {"time": time.time(), **row})

    def metrics(self, row: Mapping[str, Any]) -> None:
        """Record one executed step."""
        self._append("metrics", {"time": time.time(), **row})

    def ledger(
        self,
        step: int,
        generation: int,
        ids: list[int],
        *,
        whole: bool,
        missing: Sequence[int] = (),
        tokens: int | None = None,
    ) -> None:
        """Record the dataset indices that ``step`` consumed, all ranks together: ``whole``, or as a digest.

        Args:
            missing: data-parallel ranks whose share is not known.
            tokens: input tokens, padding left out.
        """
        held = {"ids": ids} if whole else {"count": len(ids), "digest": set_digest(ids)}
        gap = ({"missing": list(missing)} if missing else {}) | ({} if tokens is None else {"tokens": tokens})
        self._append("ledger", {"step": step, "gen": generation, **held, **gap})

    def journal(self, row: Mapping[str, Any]) -> None:
        """Record what a controller that returns must know."""
        self._append("journal", row)

    def rows(self, name: str, start: int = 0) -> list[dict[str, Any]]:
        """What was recorded so far, from byte ``start``: ``events``, ``metrics``, ``ledger``, ``goodput`` or
        ``journal``."""
        return read_lines(self.path / f"{name}.jsonl", start)

    def sizes(self) -> dict[str, int]:
        """Bytes recorded so far; the folder may hold the records of earlier submissions."""
        files = {name: self.path / f"{name}.jsonl" for name in ("events", "metrics", "ledger", "goodput")}
        return {name: file.stat().st_size if file.exists() else 0 for name, file in files.items()}

    def goodput(self, account: Mapping[str, float]) -> None:
        """Record where the wall time has gone so far, seconds by class."""
        rounded = {name: round(seconds, 4) for name, seconds in account.items()}
        self._append("goodput", {"time": time.time(), **rounded})

    def ranks(self, row: Mapping[str, Any]) -> None:
        """Record what every rank did since the row before."""
        self._append("ranks", {"time": time.time(), **row})

    def summary(self, tree: Mapping[str, Any]) -> None:
        """Write ``summary.json``."""
        self._write("summary.json", tree)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _write(self, name: str, tree: Mapping[str, Any]) -> None:
        text = json.dumps(finite(tree), indent=2, allow_nan=False) + "\n"
        with contextlib.suppress(OSError):
            (self.path / name).write_text(text, encoding="utf-8")

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        self.listener(name, row)
        line = _line(row).encode() + b"\n"
        left = self._unwritten.pop(name, b"") + line
        try:
            if name in self._files and os.fstat(self._files[name].fileno()).st_nlink == 0:  # somebody removed it
                self._files.pop(name).close()
            if name not in self._files:
                self.path.mkdir(parents=True, exist_ok=True)
                self._files[name] = _open(self.path / f"{name}.jsonl")
            while left:
                left = left[self._files[name].write(left) :]
        except OSError:
            self._unwritten[name] = left if len(left) < MOST_UNWRITTEN else left[: -len(line)]


def _open(path: Path) -> FileIO:
    """``path`` for appending; a last line that a killed writer has left torn is ended, and stays alone."""
    file = FileIO(path, "ab+")
    if file.seek(0, os.SEEK_END):
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return file


def finite(value: Any) -> Any:
    """``value``, a tree of JSON values, with null for every number that JSON cannot say: NaN and the infinities.

    Python would write them as bare words, and what reads the line next, such as ``jq`` or a browser, would refuse it.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _line(row: Mapping[str, Any]) -> str:
    try:
        return json.dumps(row, separators=(",", ":"), allow_nan=False)
    except ValueError:  # rare, so that the common line is not walked through twice
        return json.dumps(finite(row), separators=(",", ":"), allow_nan=False)


def read_lines(path: str | Path, start: int = 0) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file from byte ``start``; a torn line (a killed writer) is left out."""
    rows: list[dict[str, Any]] = []
    file = Path(path)
    if not file.exists():
        return rows
    for line in file.read_bytes()[start:].decode(errors="replace").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows
