"""Planaria: elastic, fault-tolerant training of vision-language models on Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planaria.config import ConfigError, JobConfig
    from planaria.recipe import BadSample, MicroBatch, Recipe, ShardingRules
    from planaria.trainer import ElasticTrainer, TrainingFailed, TrainingStopped

__version__ = "0.1.0"
__all__ = [
    "BadSample",
    "ConfigError",
    "ElasticTrainer",
    "JobConfig",
    "MicroBatch",
    "Recipe",
    "ShardingRules",
    "TrainingFailed",
    "TrainingStopped",
    "__version__",
]

_HOMES = {
    "ConfigError": "planaria.config",
    "JobConfig": "planaria.config",
    "BadSample": "planaria.recipe",
    "MicroBatch": "planaria.recipe",
    "Recipe": "planaria.recipe",
    "ShardingRules": "planaria.recipe",
    "ElasticTrainer": "planaria.trainer",
    "TrainingFailed": "planaria.trainer",
    "TrainingStopped": "planaria.trainer",
}


def __getattr__(name: str) -> Any:
    # Imported at first use: torch and Ray take seconds, and neither the command's help nor a planner needs them.
    if name not in _HOMES:
        raise AttributeError(f"module 'planaria' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
