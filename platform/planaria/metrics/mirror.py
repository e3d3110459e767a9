"""A few series in Ray's own metrics, which a cluster's stock monitoring scrapes already."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from planaria.metrics.book import Series
from planaria.metrics.catalogue import CATALOGUE, RUN, Metric

EVERY_S = 5.0
"""Ray forgets a gauge that has not been set for about thirty seconds, and shows it every ten."""


class RayMirror:
    """Sets gauges from a thread of its own, until :meth:`close`. Only gauges: Ray keeps showing the counters of
    processes that have ended, and a counter here would begin anew with every controller.

    Args:
        run: the job's name.
        read: values at this moment.
    """

    def __init__(self, run: str, read: Callable[[], Series]) -> None:
        from ray.util.metrics import Gauge

        self._run, self._read = run, read
        self._gauges: dict[Metric, Gauge] = {
            metric: Gauge(metric.name, metric.help, (RUN, *metric.labels))
            for metric in CATALOGUE.values()
            if metric.mirrored
        }
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="metrics-mirror", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Show the last values, and no more."""
        self._closed.set()
        self._show()

    def _repeat(self) -> None:
        while not self._closed.wait(EVERY_S):
            self._show()

    def _show(self) -> None:
        with contextlib.suppress(Exception):  # Ray may be on its way down; the job does not depend on it
            values = self._read()
            for metric, gauge in self._gauges.items():
                for at, value in values.get(metric.name, {}).items():
                    if isinstance(value, float):
                        gauge.set(value, dict(zip((RUN, *metric.labels), (self._run, *at), strict=True)))
