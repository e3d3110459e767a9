"""Which engine runs a job on a layout."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from planaria.config import JobConfig
from planaria.engine.native import NativeEngine
from planaria.engine.protocol import Engine
from planaria.layout import Layout, LayoutError
from planaria.recipe import ContrastiveRecipe, Recipe


def make_engine(recipe: Recipe, job: JobConfig, layout: Layout, mesh: DeviceMesh, device: torch.device) -> Engine:
    """The engine of ``job``, its model cut for this rank of ``layout``; no state has been loaded yet.

    Raises:
        LayoutError: the engine cannot run the layout, or not the recipe.
        ShardingError: the model cannot be cut so.
        DeepSpeedMissing: the job wants DeepSpeed, which cannot be imported.
    """
    if job.engine.name == "deepspeed":
        if isinstance(recipe, ContrastiveRecipe):
            raise LayoutError(
                f"engine.name: deepspeed would take the negatives of {type(recipe).__name__} from single "
                "micro-batches; set engine.name=native"
            )
        from planaria.engine.deepspeed import DeepSpeedEngine  # heavy, and of no use to other jobs

        return DeepSpeedEngine(recipe, job, layout, mesh, device)
    return NativeEngine(recipe, job, layout, mesh, device)
