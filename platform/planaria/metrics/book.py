"""The values of metrics of the catalogue, and nothing that is not in it. Pure; calls may come from several threads."""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from planaria.metrics.catalogue import CATALOGUE, Kind, Metric, metric

Labels = tuple[str, ...]
"""Values of a metric's labels, in its order."""


@dataclass(frozen=True)
class Histogram:
    """What was observed so far."""

    counts: tuple[int, ...]
    """Observations in each bucket, each counted once; the last are those beyond all bounds."""
    total: float


Value = float | Histogram
Series = dict[str, dict[Labels, Value]]
"""Values by metric and labels."""


class Book:
    """Counters and histograms begin at zero (``zeros``) where the values of their labels are known; gauges when set."""

    def __init__(self, *, zeros: bool = True) -> None:
        self._lock = threading.Lock()
        self._values: Series = {}
        if zeros:
            self.clear()

    def clear(self) -> None:
        """Begin anew."""
        with self._lock:
            self._values = {name: dict(_zeros(one)) for name, one in CATALOGUE.items() if one.kind is not Kind.GAUGE}

    def inc(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Let a counter grow by ``amount``, which is not negative.

        Raises:
            KeyError: the catalogue has no such metric, or the metric other labels.
        """
        found, at = _place(name, labels)
        if amount < 0:
            raise ValueError(f"{found.name} is a counter and cannot grow by {amount}")
        with self._lock:
            series = self._values.setdefault(found.name, {})
            series[at] = _number(series.get(at, 0.0)) + amount

    def set(self, name: str, value: float, **labels: str) -> None:
        """Give a gauge its value."""
        found, at = _place(name, labels)
        with self._lock:
            self._values.setdefault(found.name, {})[at] = float(value)

    def drop(self, name: str) -> None:
        """End all series of a gauge."""
        with self._lock:
            self._values.pop(metric(name).name, None)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Enter one observation into a histogram."""
        found, at = _place(name, labels)
        with self._lock:
            series = self._values.setdefault(found.name, {})
            before = series.get(at, _empty(found))
            assert isinstance(before, Histogram)
            counts = list(before.counts)
            counts[bisect_left(found.buckets, value)] += 1
            series[at] = Histogram(tuple(counts), before.total + value)

    def values(self) -> Series:
        """All values at this moment."""
        with self._lock:
            return {name: dict(series) for name, series in self._values.items()}

    def total(self, name: str) -> float:
        """Sum of a counter over its labels."""
        with self._lock:
            return sum(_number(value) for value in self._values.get(metric(name).name, {}).values())


def _number(value: Value) -> float:
    assert isinstance(value, float)
    return value


def _empty(found: Metric) -> Histogram:
    return Histogram((0,) * (len(found.buckets) + 1), 0.0)


def _place(name: str, labels: Mapping[str, str]) -> tuple[Metric, Labels]:
    found = metric(name)
    if labels.keys() != set(found.labels):
        raise KeyError(f"{found.name} has the labels {found.labels}, not {tuple(labels)}")
    return found, tuple(str(labels[label]) for label in found.labels)


def _zeros(found: Metric) -> Iterator[tuple[Labels, Value]]:
    known = dict(found.values)
    if set(found.labels) <= known.keys():
        for at in itertools.product(*(known[label] for label in found.labels)):
            yield at, _empty(found) if found.kind is Kind.HISTOGRAM else 0.0
