"""Where a training of elsewhere stood: its step, and the updates of its optimizer."""

from __future__ import annotations

import torch

from planaria.exchange.dcp import DcpSource
from planaria.exchange.errors import ExchangeError
from planaria.exchange.matching import Match
from planaria.exchange.source import Source

STEPS = ("train_state.step", "step", "global_step")
"""Entries that trainers keep their step in; the first that is there counts."""


def find_updates(source: Source, found: Match) -> int | None:
    """How many updates the source's optimizer has done: the most of any parameter; None if it does not say.

    A parameter without a gradient in some step has fewer in torch; here it is updated with a gradient of zero.
    """
    return max((_count(source.read(key), key, source.label) for key in found.steps), default=None)


def find_step(source: DcpSource, updates: int | None) -> int:
    """The step that the directory itself tells, else the number of updates.

    Raises:
        ExchangeError: it tells neither.
    """
    shapes = source.shapes()
    for key in STEPS:
        if key in shapes:
            return _count(source.read(key), key, source.label)
        if key in source.objects:
            try:
                value = source.read_object(key)
            except ExchangeError:
                continue  # some trainers put an object of their own there
            if isinstance(value, int | float | torch.Tensor):
                return _count(torch.as_tensor(value), key, source.label)
    if updates is None:
        raise ExchangeError(
            f"{source.label}: does not say how many steps were done (no {', '.join(STEPS)}, no optimizer state); "
            "give --step N"
        )
    return updates


def _count(value: torch.Tensor, key: str, label: str) -> int:
    number = float(value) if value.numel() == 1 else -1.0
    if number < 0 or not number.is_integer():
        raise ExchangeError(f"{label}: {key}: expected a count of steps, found {value.tolist()}; give --step N")
    return int(number)
