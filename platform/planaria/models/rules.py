"""How a Hugging Face VLM is cut, derived from its structure: no per-model code.

Units are the layers that transformers itself marks for gradient checkpointing. Tensor parallelism goes by
the leaf names that attention and MLP layers share across families; whatever matrix these names do not cover
is an error that lists it (:mod:`planaria.engine.tensor_parallel`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from planaria.models.families import Family
from planaria.models.families.family import Pictures
from planaria.recipe import ShardingRules, StageRules

COLWISE = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1", "linear_fc1"})
ROWWISE = frozenset({"o_proj", "out_proj", "down_proj", "fc2", "linear_fc2"})

_NO_FAMILY = Family(vision=(), projector=(), pictures=lambda _: Pictures(0, 0, (), ()))


def sharding_rules(model: nn.Module, config: PreTrainedConfig, family: Family | None = None) -> ShardingRules:
    """Rules for ``model``, a Hugging Face model built from ``config``, of ``family`` if it belongs to one."""
    known = family or _NO_FAMILY
    units = tuple(
        name
        for name, module in model.named_modules()
        if isinstance(module, GradientCheckpointingLayer) or type(module).__name__ in known.units
    )
    return ShardingRules(
        units=units,
        colwise=COLWISE,
        rowwise=ROWWISE,
        replicate=known.replicate,
        head_attributes=known.head_attributes,
        sequence_parallel=tuple(_decoder_stacks(model, units)) if known.splits_sequence else (),
        vocabulary_head="lm_head" if isinstance(getattr(model, "lm_head", None), nn.Linear) else None,
        heads={name: count for name, count in _counts(config) if name not in known.whole},
        sequence_heads={n: count for n, count in _counts(config) if n == "text_config.num_attention_heads"},
    )


def _decoder_stacks(model: nn.Module, units: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(first unit, final norm) of every causal decoder: a list of units beside ``rotary_emb`` and ``norm``.

    Only decoders: a vision tower's sequence (patches plus class token) is rarely a multiple of tp.
    """
    for name, module in model.named_modules():
        if hasattr(module, "rotary_emb") and hasattr(module, "norm") and hasattr(module, "layers"):
            first = f"{name}.layers.0"
            if first in units:
                yield first, f"{name}.norm"


def stage_rules(
    model: nn.Module, config: PreTrainedConfig, family: Family, positions: Mapping[str, int]
) -> StageRules | None:
    """Pipeline stages are cut between the layers of the decoder: the first runs the vision tower, the projector and
    the embedding, too, the last the final norm and the head. None for a model without exactly one decoder whose
    layers take nothing but hidden states of what lies before.

    Args:
        model: a Hugging Face VLM of ``family``, built from ``config``.
        positions: positions per sample by module, see :class:`planaria.recipe.StageRules`.
    """
    sharding = tuple(name for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer))
    stacks = list(_decoder_stacks(model, sharding))
    together = family.together(config)
    if len(stacks) != 1 or together is None:
        return None
    first, norm = stacks[0]
    prefix = first.removesuffix("0")
    head = ("lm_head",) if isinstance(getattr(model, "lm_head", None), nn.Module) else ()
    layers = tuple(name for name in sharding if name.startswith(prefix))
    return StageRules(layers, (norm, *head), positions, together=together)


def resume(model: nn.Module, family: Family, hidden: Tensor, kwargs: Mapping[str, Any]) -> Any:
    """Run ``model`` from ``hidden`` [B, L, H], as if it were its input embeddings, pictures merged in already."""
    merged = ("input_ids", "pixel_", "image_", "mm_")
    rest = {key: value for key, value in kwargs.items() if not key.startswith(merged)}
    return model(inputs_embeds=hidden, **rest, **family.positions(model, kwargs))


def _counts(config: PreTrainedConfig) -> Iterator[tuple[str, int]]:
    for part in ("text_config", "vision_config"):
        section = getattr(config, part, None)
        for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            count = getattr(section, key, None)
            if isinstance(count, int):
                yield f"{part}.{key}", count
