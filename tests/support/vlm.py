"""Small vision-language jobs for tests, on top of the harness of ``planaria parity``."""

from __future__ import annotations

from typing import Any, cast

from planaria.config import JobConfig
from planaria.engine.native import NativeEngine
from planaria.parity import steps
from planaria.parity.measure import Held, assemble, held, relative_errors
from planaria.parity.reference import Reference
from planaria.parity.steps import CPU, batches, step, total_targets
from planaria.recipe import Recipe
from planaria.runtime.groups import Groups

__all__ = [
    "CPU",
    "Held",
    "Reference",
    "assemble",
    "batches",
    "engine_of",
    "held",
    "relative_errors",
    "step",
    "total_targets",
    "vlm_job",
]


def vlm_job(preset: str = "llava-tiny", **overrides: Any) -> JobConfig:
    """:func:`planaria.parity.steps.small_job`; ``overrides`` are dotted keys, with ``__`` for the dot."""
    given = {dotted.replace("__", "."): value for dotted, value in overrides.items()}
    return steps.small_job({"model": {"preset": preset}} | given)


def engine_of(groups: Groups, recipe: Recipe, job: JobConfig) -> NativeEngine:
    """A native engine with the state before the first step."""
    return cast(NativeEngine, steps.engine_of(groups, recipe, job))
