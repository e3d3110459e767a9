"""What a Prometheus server would see of a run: scrapes in a thread, from the address that the run's events name."""

from __future__ import annotations

import contextlib
import threading
import time
import urllib.request
from pathlib import Path
from types import TracebackType

from prometheus_client.parser import text_string_to_metric_families

from planaria.observe.record import read_lines

EVERY_S = 0.25
Key = tuple[str, tuple[tuple[str, str], ...]]


class Scrapes:
    """Scrapes while the ``with`` block runs.

    Args:
        storage: of the job.
        name: of the run.
    """

    def __init__(self, storage: Path, name: str = "run") -> None:
        self._events = storage / name / "events.jsonl"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)
        self.seen: list[tuple[float, dict[Key, float]]] = []
        """(time, value by name and labels) of every scrape that was answered."""
        self.counters: set[str] = set()
        """Names of samples that must never fall."""

    def __enter__(self) -> Scrapes:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join(10.0)

    def value(self, name: str, scrape: int = -1, **labels: str) -> float | None:
        """A sample of a scrape (the last); None if it is not in it. ``run`` goes without saying."""
        at = tuple(sorted({"run": self._events.parent.name, **labels}.items()))
        return self.seen[scrape][1].get((name, at))

    def falls(self) -> list[str]:
        """Counters that were lower in one scrape than in an earlier one, or were missing later on."""
        found = []
        highest: dict[Key, float] = {}
        for at, values in self.seen:
            for key, before in highest.items():
                if (now := values.get(key)) is None or now < before:
                    found.append(f"{key} fell from {before} to {now} at {at}")
            highest |= {key: value for key, value in values.items() if key[0] in self.counters}
        return found

    def nodes(self, after: float) -> set[str]:
        """Nodes that the ranks' series of scrapes after a time (``time.time()``) name."""
        keys = [
            key for at, values in self.seen if at > after for key in values if key[0] == "planaria_rank_step_seconds"
        ]
        return {dict(labels)["node"] for _, labels in keys}

    def _repeat(self) -> None:
        while not self._over.wait(EVERY_S):
            address = [row["address"] for row in read_lines(self._events) if row["event"] == "metrics"]
            if address:
                with contextlib.suppress(OSError):  # the controller may be gone for a moment, or for good
                    self._scrape(f"http://{address[-1]}/metrics")

    def _scrape(self, url: str) -> None:
        at = time.time()
        with urllib.request.urlopen(url, timeout=5.0) as answer:
            text = answer.read().decode()
        values: dict[Key, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
                if family.type in ("counter", "histogram"):
                    self.counters.add(sample.name)
        self.seen.append((at, values))
