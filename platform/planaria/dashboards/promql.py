"""PromQL over the catalogue: a metric, label or label value that does not exist is an error at once. Pure."""

from __future__ import annotations

from planaria.metrics.catalogue import RUN, Kind, Metric, metric

CHOSEN = 'cluster=~"$cluster",run=~"$run"'
"""What the reader chose at the top of the dashboard."""
WINDOW = "$__rate_interval"


def series(name: str, **where: str) -> str:
    """The chosen series of a metric; ``where`` are regular expressions on further labels.

    Raises:
        KeyError: there is no such metric.
        ValueError: it has no such label, or the label never has that value.
    """
    return _selector(metric(name), metric(name).name, where)


def rate(name: str, window: str = WINDOW, **where: str) -> str:
    """Growth per second of a counter, or of a histogram's sum with ``name`` ending in ``:sum`` or ``:count``."""
    return f"rate({_counter(name, where)}[{window}])"


def increase(name: str, window: str = "$__range", **where: str) -> str:
    """Growth over ``window`` of a counter, or of a histogram's ``:sum`` or ``:count``."""
    return f"increase({_counter(name, where)}[{window}])"


def mean(name: str, window: str = WINDOW, *by: str, **where: str) -> str:
    """Mean of what a histogram observed within ``window``, by run and the labels ``by``."""
    labels = ", ".join((RUN, *by))
    total, count = (f"sum by ({labels}) ({rate(f'{name}:{part}', window, **where)})" for part in ("sum", "count"))
    return f"{total} / ({count} > 0)"


def quantile(q: float, name: str, window: str = WINDOW, *by: str, **where: str) -> str:
    """Quantile ``q`` of what a histogram observed within ``window``, by run and the labels ``by``."""
    return f"histogram_quantile({q:g}, {buckets(name, window, *by, **where)})"


def buckets(name: str, window: str = WINDOW, *by: str, **where: str) -> str:
    """Growth of a histogram's buckets, by run and the labels ``by``."""
    found = metric(name)
    if found.kind is not Kind.HISTOGRAM:
        raise ValueError(f"{found.name} is a {found.kind}, and only a histogram has buckets")
    labels = ", ".join((RUN, *by, "le"))
    return f"sum by ({labels}) (rate({_selector(found, found.name + '_bucket', where)}[{window}]))"


def _counter(name: str, where: dict[str, str]) -> str:
    base, _, part = name.partition(":")
    found = metric(base)
    wanted = Kind.HISTOGRAM if part else Kind.COUNTER
    if found.kind is not wanted:
        raise ValueError(f"{name}: {found.name} is a {found.kind}, and not a {wanted}")
    return _selector(found, f"{found.name}_{part}" if part else found.name, where)


def _selector(found: Metric, name: str, where: dict[str, str]) -> str:
    known = dict(found.values)
    for label, pattern in where.items():
        if label not in found.labels:
            raise ValueError(f"{found.name} has no label {label!r}, but {', '.join(found.labels) or 'none'}")
        unknown = [value for value in pattern.split("|") if label in known and value not in known[label]]
        if unknown and "$" not in pattern:
            raise ValueError(f"{found.name}: label {label!r} is never {unknown[0]!r}, but {', '.join(known[label])}")
    more = "".join(f',{label}=~"{pattern}"' for label, pattern in where.items())
    return f"{name}{{{CHOSEN}{more}}}"
