"""What DeepSpeed is told. Pure."""

from __future__ import annotations

from typing import Any

from planaria.config import ConfigError, JobConfig
from planaria.data.plan import micro_batch_plan
from planaria.layout import Layout, LayoutError
from planaria.recipe import ContrastiveRecipe, Recipe

BUCKET = 50_000_000
"""Most elements in one message: 200 MB of float32."""
NEVER = 2**31


def check(recipe: Recipe, layout: Layout) -> None:
    """Refuse what DeepSpeed does not run here.

    Raises:
        LayoutError: the layout.
        ConfigError: the recipe.
    """
    if isinstance(recipe, ContrastiveRecipe):
        raise ConfigError(
            "engine.name: deepspeed does not train dual encoders, whose loss sees the features of all micro-batches at "
            "once; set engine.name: native"
        )
    if others := [axis for axis in ("pp", "cp", "tp", "dp_replicate") if getattr(layout, axis) > 1]:
        raise LayoutError(
            f"engine.name: deepspeed shards over all ranks and runs no {', '.join(others)} (layout {layout}); "
            "set these degrees to 1, or engine.name: native"
        )


def settings(job: JobConfig, layout: Layout, trainable: int) -> dict[str, Any]:
    """DeepSpeed's configuration for ``job`` on ``layout``.

    Args:
        trainable: number of trainable parameters, which bounds the size of messages.

    Gradients are to be summed: the loss is divided by the global count of targets before. Clipping, the check for
    numbers that are not finite and the learning rate are the platform's own, so DeepSpeed's are off.
    """
    engine, train = job.engine, job.train
    stage = engine.zero_stage
    bucket = max(1, min(BUCKET, trainable))
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": 2 * bucket,
        # It would replace torch.nn.functional.linear in the whole process.
        "memory_efficient_linear": False,
    }
    if stage == 3:
        zero["stage3_prefetch_bucket_size"] = bucket
    if engine.offload_optimizer is not None:
        zero["offload_optimizer"] = {"device": engine.offload_optimizer, "pin_memory": False}
    elif stage in (1, 2):
        zero["compute_grad_norm"] = False
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": train.micro_batch,
        "gradient_accumulation_steps": micro_batch_plan(train.global_batch, layout.dp, train.micro_batch).count,
        "zero_optimization": zero,
        # The optimizer is torch's, with the platform's clipping: nothing has to be compiled.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
        "communication_data_type": "fp32",
        "steps_per_print": NEVER,
    }
    if stage < 3:  # with stage 3 DeepSpeed knows averages only
        found["gradient_allreduce_op"] = "sum"
    if train.precision == "bf16":
        found["bf16"] = {"enabled": True}
        found["data_types"] = {"grad_accum_dtype": "fp32"}
    return found
