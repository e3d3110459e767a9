"""What the planner must know of a model."""

from __future__ import annotations

from torch import nn

from planaria.config import ConfigError, JobConfig
from planaria.engine.context_parallel import check_context_parallel
from planaria.engine.initial import build
from planaria.engine.tensor_parallel import ShardingError, check_divides
from planaria.engine.zero.settings import check
from planaria.layout import Layout
from planaria.planner.plan import ModelFacts
from planaria.recipe import Recipe, StagedRecipe


def model_facts(recipe: Recipe, job: JobConfig) -> ModelFacts:
    """Counts that tensor and context parallelism must divide, the number of parameters, and of possible stages.

    Raises:
        ConfigError: a configured degree or engine does not fit the model.
    """
    if job.engine.name == "deepspeed":
        check(recipe, Layout())
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
        stages=_stages(recipe, model, job),
    )


def _stages(recipe: Recipe, model: nn.Module, job: JobConfig) -> int | None:
    """Most stages that the model can be cut into; looked at only where the job wants some."""
    if job.layout.pp == 1:
        return None
    if not isinstance(recipe, StagedRecipe):
        raise ConfigError(
            f"layout.pp: {job.layout.pp}, but {type(recipe).__name__} does not say where its model may be cut into "
            "stages; implement stage_rules() and resume() (planaria.recipe.StagedRecipe), or set layout.pp=1"
        )
    rules, wanted = recipe.stage_rules(model), job.layout.pp * job.layout.virtual_stages
    layers = len(rules.layers) - rules.together + 1  # those that stay together count once
    if wanted > layers:
        raise ConfigError(
            f"layout.pp: {job.layout.pp} with virtual_stages={job.layout.virtual_stages} makes {wanted} stages, but "
            f"the model has {layers} layers to cut between; set layout.pp={max(1, layers // job.layout.virtual_stages)}"
        )
    return layers
