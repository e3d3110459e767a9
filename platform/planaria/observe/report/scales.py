"""From values to places on a drawing, and the round numbers that stand at its edge."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

ROUND_SPANS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200)
DAY_S = 86400.0
RESOLVED = 1e-9
"""A span that is a smaller part of its ends is not divided: the numbers beside it could not be told apart."""


@dataclass(frozen=True)
class Scale:
    """Maps ``low``..``high`` linearly to ``start``..``end``; a span of nothing maps to the middle."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The place of ``value``; those beyond the ends are held at the ends."""
        if not self.high > self.low:
            return (self.start + self.end) / 2
        share = min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))
        return self.start + (self.end - self.start) * share


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers within ``low``..``high``, at most ``wanted`` + 1 of them; ``[low]`` if there is hardly a span."""
    span = high - low
    if not math.isfinite(span) or not span > RESOLVED * max(abs(low), abs(high)):
        return [low]
    size = 10.0 ** math.floor(math.log10(span / wanted))
    steps = (size * factor for factor in (1, 2, 5, 10, 20) if span / (size * factor) <= wanted)
    return _multiples(low, high, next(steps, span))


def time_ticks(seconds: float, wanted: int = 5) -> list[float]:
    """Round durations from 0 to at most ``seconds``: whole seconds, minutes, hours or days where they are long."""
    if not seconds > 0:
        return [0.0]
    fitting = (span for span in ROUND_SPANS_S if seconds / span <= wanted)
    days = max(1.0, math.ceil(seconds / DAY_S / wanted)) * DAY_S
    return _multiples(0.0, seconds, next(fitting, days))


def time_label(places: Sequence[float]) -> Callable[[float], str]:
    """How the durations of :func:`time_ticks` are written: in the largest unit that leaves them whole."""
    step = places[1] - places[0] if len(places) > 1 else 0.0
    for unit, size in (("d", DAY_S), ("h", 3600.0), ("min", 60.0)):
        if step >= size and step % size == 0:
            return lambda seconds: "0" if not seconds else f"{seconds / size:g} {unit}"
    return lambda seconds: "0" if not seconds else f"{seconds:g} s"


def _multiples(low: float, high: float, step: float) -> list[float]:
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    if last < first:
        return [low]
    return [float(f"{step * number:.12g}") for number in range(first, last + 1)]
