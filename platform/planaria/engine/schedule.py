"""Learning rate as a pure function of the step, so that no scheduler state can be lost."""

from __future__ import annotations

import math

from planaria.config import ScheduleConfig


def lr_factor(step: int, total: int, schedule: ScheduleConfig) -> float:
    """Factor on the peak learning rate at 0-based ``step`` of ``total``.

    Linear warm-up to 1, then constant, linear or cosine (arXiv:1608.03983) decay to ``min_ratio``.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return 1.0
    span = max(1, total - 1 - schedule.warmup_steps)
    done = min(1.0, (step - schedule.warmup_steps) / span)
    curve = 1.0 - done if schedule.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return schedule.min_ratio + (1.0 - schedule.min_ratio) * curve
