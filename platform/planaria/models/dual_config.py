"""From a model section to the config of a Hugging Face dual encoder, and to an unsharded model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    CLIPConfig,
    CLIPModel,
    PreTrainedConfig,
    SiglipConfig,
    SiglipModel,
)

from planaria.config import ConfigError, ModelConfig
from planaria.data.tokens import TextCodec
from planaria.models.presets import PRESETS

CLASSES: dict[str, tuple[Any, Any]] = {
    "clip": (CLIPConfig, CLIPModel),
    "siglip": (SiglipConfig, SiglipModel),
}
PARTS = {
    "vision": ("vision_model",),
    "language": ("text_model",),
    "projector": ("visual_projection", "text_projection"),
}
LEGACY_EOS = 2
"""With this end-of-sequence id in its config CLIP pools at the largest id instead, as its first releases did."""


def model_type(model: ModelConfig | None) -> str | None:
    """What a model section says of its type; None if it does not, or cannot be read."""
    if model is None:
        return None
    tree: Any = model.config
    if model.preset is not None:
        tree = PRESETS.get(model.preset)
    elif model.path is not None:
        try:
            tree = json.loads((Path(model.path) / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
    found = tree.get("model_type") if isinstance(tree, dict) else None
    return found if isinstance(found, str) else None


def dual_config(model: ModelConfig, codec: TextCodec) -> PreTrainedConfig:
    """The Hugging Face config of ``model``, whose type is one of :data:`CLASSES`.

    For a preset or an inline config, vocabulary and special ids follow the tokenizer unless given.

    Raises:
        ConfigError: unreadable, inconsistent, or not fit for the tokenizer.
    """
    key = "model.config" if model.path is None else "model.path"
    try:
        if model.path is not None:
            config = AutoConfig.from_pretrained(model.path, local_files_only=True)
        else:
            config = _from_tree(PRESETS[model.preset] if model.preset is not None else model.config or {}, codec)
    except Exception as error:
        raise ConfigError(f"{key}: transformers refuses it: {error}") from None
    _check(config, key, codec)
    return config


def _from_tree(tree: dict[str, Any], codec: TextCodec) -> PreTrainedConfig:
    text = {
        "vocab_size": codec.vocab_size,
        "eos_token_id": codec.eos_id,
        "pad_token_id": codec.pad_id,
        "bos_token_id": codec.tokenizer.bos_token_id,
    } | dict(tree.get("text_config") or {})
    rest = {key: value for key, value in tree.items() if key not in ("model_type", "text_config")}
    config: PreTrainedConfig = CLASSES[tree["model_type"]][0](text_config=text, **rest)
    return config


def _check(config: Any, key: str, codec: TextCodec) -> None:
    text, vision = config.text_config, config.vision_config
    if not isinstance(vision.image_size, int) or not isinstance(vision.patch_size, int):
        raise ConfigError(f"{key}.vision_config: image_size and patch_size must be whole numbers (square pictures)")
    if vision.image_size % vision.patch_size:
        raise ConfigError(
            f"{key}.vision_config.image_size: {vision.image_size} is not a multiple of patch_size {vision.patch_size}"
        )
    if config.model_type == "siglip":
        if not vision.vision_use_head:
            raise ConfigError(f"{key}.vision_config.vision_use_head: false leaves no image feature; set it to true")
        if text.projection_size != vision.hidden_size:
            raise ConfigError(
                f"{key}: text features have {text.projection_size} dimensions, image features {vision.hidden_size}; "
                "set text_config.projection_size to vision_config.hidden_size"
            )
    # The image placeholder, which no caption holds, may have been added to the tokenizer as its last id.
    ids = codec.vocab_size - (codec.image_id == codec.vocab_size - 1)
    if text.vocab_size < ids:
        raise ConfigError(
            f"data.tokenizer: it has {ids} ids, but {key}.text_config.vocab_size is {text.vocab_size}; "
            "give the tokenizer directory that belongs to the model"
        )
    if config.model_type == "clip":
        _check_pooling(text.eos_token_id, key, codec, ids)


def _check_pooling(eos: Any, key: str, codec: TextCodec, ids: int) -> None:
    """CLIP's text feature is that of the end-of-sequence token: where the ids differ, it is that of some other."""
    if eos == LEGACY_EOS:
        if codec.eos_id != ids - 1:
            raise ConfigError(
                f"{key}.text_config.eos_token_id: {LEGACY_EOS} makes CLIP pool at the largest id of a text, which is "
                f"not the tokenizer's end of sequence ({codec.eos_id}); set it to the id that the weights were "
                "trained with, or give the tokenizer directory that belongs to the model"
            )
    elif eos != codec.eos_id:
        raise ConfigError(
            f"{key}.text_config.eos_token_id: {eos}, but the tokenizer ends a text with {codec.eos_id}, so CLIP "
            "would pool at the wrong position; leave it out, or give the tokenizer that belongs to the model"
        )


def build_dual(config: PreTrainedConfig, freeze: tuple[str, ...]) -> nn.Module:
    """The model, on the current default device, its class untouched.

    FSDP2 cannot shard a parameter without a dimension, and CLIP's ``logit_scale`` is one: it becomes one of shape
    (1,), which the model multiplies with all the same. ``scalar_parameters`` of the model names what was changed;
    files hold it as its class has it.

    Raises:
        ConfigError: a frozen part that the model does not have.
    """
    network: Any = CLASSES[config.model_type][1](config)
    scalars = [name for name, parameter in network.named_parameters() if parameter.dim() == 0]
    for name in scalars:
        owner, _, leaf = name.rpartition(".")
        parameter = network.get_parameter(name)
        vector = nn.Parameter(parameter.detach().reshape(1), requires_grad=parameter.requires_grad)
        network.get_submodule(owner).register_parameter(leaf, vector)
    network.scalar_parameters = frozenset(scalars)
    network.config._attn_implementation = "sdpa"
    for part in freeze:
        modules = [module for name in PARTS[part] if isinstance(module := getattr(network, name, None), nn.Module)]
        if not modules:
            raise ConfigError(f"model.freeze: {config.model_type} has no {part}; leave it out")
        for module in modules:
            module.requires_grad_(False)
    built: nn.Module = network
    return built


def init_logits(model: nn.Module, config: Any) -> None:
    """Set scale and bias of the logits, in place.

    transformers leaves CLIP's scale as the memory was, and starts SigLIP with zeros, where the paper
    (arXiv:2303.15343, section 3.2) has a scale of 10 and a bias of -10: most pairs are negative.
    """
    with torch.no_grad():
        if config.model_type == "clip":
            model.get_parameter("logit_scale").fill_(config.logit_scale_init_value)
        else:
            model.get_parameter("logit_scale").copy_(torch.tensor(10.0).log())
            model.get_parameter("logit_bias").fill_(-10.0)
