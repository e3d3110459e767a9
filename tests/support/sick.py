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

    def __init__(self, length: int, first: int, stop: int) -> None:
        super().__init__(length)
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
        return PoisonedPoints(self.length, self.first, self.stop)


@dataclass
class StuckRecipe(ToyRecipe):
    """The first process that finds the file ``flag`` takes it away, and stands still in its loss."""

    flag: str = ""

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        if Path(self.flag).exists():
            try:
                os.rename(self.flag, f"{self.flag}-{os.getpid()}")
            except OSError:
                pass  # another one was faster
            else:
                stand_still()
        return super().loss(model, batch)


def stand_still() -> Any:
    """What a deadlock in the user's code looks like."""
    while True:
        time.sleep(1.0)
