"""What is compared: families of models, and variants of the way they are cut and driven.

Both are plain lists; whoever adds a family, an axis, a schedule or an engine adds an entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from planaria.config import JobConfig
from planaria.layout import Layout
from planaria.models.choose import job_recipe
from planaria.models.presets import PRESETS
from planaria.recipe import Recipe


@dataclass(frozen=True)
class Family:
    """One row: a model, and what it is trained on.

    Attributes:
        name: shown in the table.
        overrides: keys of the job (dotted) that make it.
        recipe: from the job to the recipe.
    """

    name: str
    overrides: Mapping[str, Any]
    recipe: Callable[[JobConfig], Recipe] = job_recipe


@dataclass(frozen=True)
class Variant:
    """One column: a layout, and how the step goes on it.

    Attributes:
        name: shown in the table.
        layout: at most :data:`MOST_RANKS` ranks.
        overrides: keys of the job (dotted) that choose a schedule, an engine, the mix of a micro-batch.
        optimizers: whose steps are compared beside the gradients; none, where gradients say all there is to say.
    """

    name: str
    layout: Layout
    overrides: Mapping[str, Any] = field(default_factory=dict)
    optimizers: tuple[str, ...] = ("sgd", "adamw")


MOST_RANKS = 8

OPTIMIZERS: dict[str, dict[str, Any]] = {
    # Adam's first steps barely depend on the scale of a gradient; SGD's do.
    "sgd": {"optim.name": "sgd", "optim.momentum": 0.9, "optim.lr": 0.02, "optim.weight_decay": 0.1},
    "adamw": {"optim.name": "adamw", "optim.lr": 1e-3, "optim.weight_decay": 0.1},
}


def _preset(name: str) -> Family:
    return Family(name.removesuffix("-tiny"), {"model.preset": name})


def _pairs(name: str) -> Family:
    """A dual encoder, whose samples are pictures with captions alone; several blocks of columns per step."""
    pairs = {"data.scenes.caption_fraction": 1.0, "data.scenes.text_only_fraction": 0.0, "contrastive.columns": 3}
    return Family(name.removesuffix("-tiny"), {"model.preset": name, **pairs})


DUAL = ("clip-tiny", "siglip-tiny")

FAMILIES: list[Family] = [_pairs(name) if name in DUAL else _preset(name) for name in PRESETS]

TEXT_ONLY = {"data.scenes.text_only_fraction": 1.0}
PICTURES_ONLY = {"data.scenes.text_only_fraction": 0.0, "train.micro_batch": 8}

NO_SP = {"layout.sequence_parallel": False}


def _piped(schedule: str) -> dict[str, Any]:
    """Micro-batches of one sample, so that a pipeline has several."""
    return {"layout.pipeline_schedule": schedule, "train.micro_batch": 1}


VARIANTS: list[Variant] = [
    Variant("single", Layout()),
    Variant("fsdp 2", Layout(dp_shard=2)),
    Variant("fsdp 3 (uneven)", Layout(dp_shard=3)),
    Variant("ddp 3 (uneven)", Layout(dp_replicate=3)),
    Variant("hsdp 2x2", Layout(dp_replicate=2, dp_shard=2)),
    Variant("tp 2 + sp", Layout(tp=2)),
    Variant("tp 2", Layout(tp=2), {"layout.sequence_parallel": False}),
    Variant("fsdp 2 x tp 2 + sp", Layout(dp_shard=2, tp=2)),
    Variant("ddp 2 x tp 2 + sp", Layout(dp_replicate=2, tp=2)),
    Variant("fsdp 3 x tp 2 + sp", Layout(dp_shard=3, tp=2)),
    Variant("fsdp 4 x tp 2 + sp", Layout(dp_shard=4, tp=2)),
    Variant("cp 2", Layout(cp=2)),
    Variant("cp 4", Layout(cp=4)),
    Variant("fsdp 3 x cp 2 (uneven)", Layout(dp_shard=3, cp=2)),
    Variant("cp 2 x tp 2 + sp", Layout(cp=2, tp=2)),
    Variant("ddp 2 x cp 2 x tp 2", Layout(dp_replicate=2, cp=2, tp=2), {"layout.sequence_parallel": False}),
    Variant("pp 2 x cp 2 x tp 2 + sp", Layout(pp=2, cp=2, tp=2)),
    Variant("cp 2, text only", Layout(cp=2), TEXT_ONLY, ()),
    Variant("pp 2, 1f1b", Layout(pp=2), _piped("1f1b")),
    Variant("pp 2, gpipe", Layout(pp=2), _piped("gpipe")),
    Variant("pp 2, zero bubble", Layout(pp=2), _piped("zero_bubble")),
    Variant("pp 3 (uneven), 1f1b", Layout(pp=3), _piped("1f1b")),
    Variant("fsdp 2 x pp 2, zero bubble", Layout(pp=2, dp_shard=2), _piped("zero_bubble")),
    Variant("ddp 3 x pp 2, 1f1b", Layout(pp=2, dp_replicate=3), _piped("1f1b")),
    Variant("tp 2 + sp x pp 2, 1f1b", Layout(pp=2, tp=2), _piped("1f1b")),
    Variant("fsdp 2 x tp 2 + sp x pp 2, 1f1b", Layout(pp=2, dp_shard=2, tp=2), _piped("1f1b")),
    Variant("fsdp 2 x tp 2 x pp 2, zero bubble", Layout(pp=2, dp_shard=2, tp=2), _piped("zero_bubble") | NO_SP),
    Variant("pp 2, 1f1b, text only", Layout(pp=2), _piped("1f1b") | TEXT_ONLY, ()),
    Variant("fsdp 2, text only", Layout(dp_shard=2), TEXT_ONLY, ()),
    Variant("fsdp 2, pictures only", Layout(dp_shard=2), PICTURES_ONLY, ()),
]
