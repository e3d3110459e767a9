"""What the planner must know of a model."""

from __future__ import annotations

from planaria.config import ConfigError, JobConfig
from planaria.engine.context_parallel import check_context_parallel
from planaria.engine.initial import build
from planaria.engine.tensor_parallel import ShardingError, check_divides
from planaria.planner.plan import ModelFacts
from planaria.recipe import Recipe


def model_facts(recipe: Recipe, job: JobConfig) -> ModelFacts:
    """Counts that tensor and context parallelism must divide, and the number of parameters.

    Raises:
        ConfigError: a configured degree does not fit the model.
    """
    model = build(recipe, job)
    rules = recipe.sharding(model)
    try:
        check_divides(rules, job.layout.tp)
    except ShardingError as error:
        raise ConfigError(f"layout.tp: {error}") from None
    if job.layout.tp > 1 and not rules.colwise:
        raise ConfigError(f"layout.tp: {job.layout.tp}, but the recipe has no tensor-parallel rules; set layout.tp=1")
    try:
        check_context_parallel(recipe, rules, job.layout.tp, job.layout.cp)
    except ShardingError as error:
        raise ConfigError(f"layout.cp: {error}") from None
    return ModelFacts(
        tp_divides=dict(rules.heads),
        parameters=sum(p.numel() for p in model.parameters()),
        cp_divides=dict(rules.sequence_heads),
    )
