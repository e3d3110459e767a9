"""Values of the catalogue's metrics as Prometheus' client library writes them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from planaria.metrics.book import Histogram, Labels, Series, Value
from planaria.metrics.catalogue import CATALOGUE, RUN, Kind, Metric

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class JobCollector(Collector):
    """Shows what ``read`` returns at each scrape.

    Args:
        run: the job's name, a label of every series.
        read: values at this moment; called from the threads that answer scrapes.
    """

    def __init__(self, run: str, read: Callable[[], Series]) -> None:
        self._run, self._read = run, read

    def describe(self) -> Iterable[Family]:
        """Nothing: names come from one catalogue, so none can stand twice."""
        return []

    def collect(self) -> Iterable[Family]:
        """The metrics that have a value, in the order of the catalogue."""
        values = self._read()
        for name, metric in CATALOGUE.items():
            if series := values.get(name):
                yield _family(metric, self._run, series)


def registry_of(run: str, read: Callable[[], Series]) -> CollectorRegistry:
    """A registry of its own, so that what libraries count in the process is not mixed in."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(JobCollector(run, read))
    return registry


def _family(metric: Metric, run: str, series: Mapping[Labels, Value]) -> Family:
    labels = (RUN, *metric.labels)
    if metric.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=labels)
        for at, value in series.items():
            assert isinstance(value, Histogram)
            bounds = [f"{bound:g}" for bound in metric.buckets] + ["+Inf"]
            cumulative = list(zip(bounds, itertools.accumulate(map(float, value.counts)), strict=True))
            histogram.add_metric((run, *at), cumulative, value.total)
        return histogram
    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=labels)
    for at, value in series.items():
        assert isinstance(value, float)
        family.add_metric((run, *at), value)
    return family
