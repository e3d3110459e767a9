"""Recipes whose data or code are at fault, at a chosen place."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.toy import Points, ToyRecipe
from torch import Tensor, nn

from planaria.recipe import Dataset


class PoisonedPoints(Points):
    """Samples from ``first`` on, up to and without ``stop``, are not numbers."""

    def __init__(self, length: int, samples: int, first: int, stop: int) -> None:
        super().__init__(length, samples)
        self.first, self.stop = first, stop

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        points, label = super().__getitem__(index)
        return (points * np.float32("nan") if self.first <= index < self.stop else points), label


@dataclass
class PoisonedRecipe(ToyRecipe):
    """The toy on poisoned points."""

    first: int = 0
    stop: int = 0

    def dataset(self, split: str) -> Dataset:
        return PoisonedPoints(self.length, self.samples, self.first, self.stop)


@dataclass
class StuckRecipe(ToyRecipe):
    """The first process that finds the file ``flag`` takes it away, and stands still in its loss."""

    flag: str = ""

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        if _takes(self.flag):
            stand_still()
        return super().loss(model, batch)


@dataclass
class SlowRecipe(ToyRecipe):
    """The first process that finds the file ``flag`` takes it away, and computes slowly from then on."""

    flag: str = ""

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        if _takes(self.flag) or Path(_taken(self.flag)).exists():
            began = time.thread_time()
            while time.thread_time() - began < SLOWER_S:
                pass
        return super().loss(model, batch)


SLOWER_S = 0.1
"""What a slow process computes more, per micro-batch."""


def _taken(flag: str) -> str:
    return f"{flag}-{os.getpid()}"


def _takes(flag: str) -> bool:
    """Whether this process is the first to find the file."""
    if not Path(flag).exists():
        return False
    try:
        os.rename(flag, _taken(flag))
    except OSError:  # another one was faster
        return False
    return True


def stand_still() -> Any:
    """What a deadlock in the user's code looks like."""
    while True:
        time.sleep(1.0)
