"""Planaria: elastic, fault-tolerant training of vision-language models on Ray."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from planaria.config import ConfigError as ConfigError
    from planaria.config import JobConfig as JobConfig
    from planaria.recipe import BadSample as BadSample
    from planaria.recipe import MicroBatch as MicroBatch
    from planaria.recipe import Recipe as Recipe
    from planaria.recipe import ShardingRules as ShardingRules
    from planaria.trainer import ElasticTrainer as ElasticTrainer

_HOMES = {
    "ConfigError": "planaria.config",
    "JobConfig": "planaria.config",
    "BadSample": "planaria.recipe",
    "MicroBatch": "planaria.recipe",
    "Recipe": "planaria.recipe",
    "ShardingRules": "planaria.recipe",
    "ElasticTrainer": "planaria.trainer",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Load public names at first use: ``import planaria.layout`` must not cost the import of torch and Ray."""
    if name not in _HOMES:
        raise AttributeError(f"module 'planaria' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
