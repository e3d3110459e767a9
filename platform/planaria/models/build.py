"""From a model section to a Hugging Face config and an unsharded model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from planaria.config import ConfigError, ModelConfig
from planaria.models.families import FAMILIES, Family, generic
from planaria.models.presets import PRESETS


def hf_config(model: ModelConfig, *, vocab_size: int, image_token_id: int) -> PreTrainedConfig:
    """The Hugging Face config of ``model``.

    For a preset or an inline config, vocabulary size and image token follow the tokenizer unless given;
    for a directory they are what its weights were trained with.

    Raises:
        ConfigError: unknown preset, unreadable directory, unsupported or inconsistent config.
    """
    if model.path is not None:
        return _from_directory(model.path)
    if model.preset is not None:
        if model.preset not in PRESETS:
            raise ConfigError(f"model.preset: {model.preset!r} is unknown; choose one of {', '.join(PRESETS)}")
        tree: dict[str, Any] = PRESETS[model.preset]
    else:
        tree = model.config or {}
    return _from_tree(tree, vocab_size, image_token_id)


def family_of(config: PreTrainedConfig) -> Family:
    """The family of ``config``: one of the table, or what the generic rules make of its class.

    Raises:
        ConfigError: no class of image-text models, or one that the generic rules do not cover; lists what is missing.
    """
    known = FAMILIES.get(config.model_type)
    if known is not None:
        return known
    try:
        with torch.device("meta"):
            return generic.family_of(_class_of(config)(config))
    except ValueError as error:
        raise ConfigError(
            f"model: model_type {config.model_type!r} has no family of its own ({', '.join(FAMILIES)}), and the "
            f"generic rules do not cover it: {error}"
        ) from None


def build_model(config: PreTrainedConfig, family: Family, freeze: tuple[str, ...]) -> nn.Module:
    """The model, on the current default device; parts that cannot or shall not train are frozen."""
    network: Any = _class_of(config)(config)
    network.config._attn_implementation = "sdpa"
    family.freeze_unused(network)
    for name, parameter in network.named_parameters():
        if family.part_of(name) in freeze:
            parameter.requires_grad_(False)
    built: nn.Module = network
    return built


def pixel_statistics(
    usual: tuple[tuple[float, ...], tuple[float, ...]], path: str | None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(mean, std) per channel: from the directory's preprocessor_config.json, else the ``usual`` ones."""
    if path is not None:
        file = Path(path) / "preprocessor_config.json"
        if file.exists():
            stored = json.loads(file.read_text(encoding="utf-8"))
            if "image_mean" in stored and "image_std" in stored:
                return tuple(stored["image_mean"]), tuple(stored["image_std"])
    return usual


def _class_of(config: PreTrainedConfig) -> Any:
    found = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    if found is None:
        raise ConfigError(
            f"model: model_type {config.model_type!r} is not supported: transformers has no image-text model for it; "
            f"use one of {', '.join(FAMILIES)}"
        )
    return found[0] if isinstance(found, (list, tuple)) else found


def _from_directory(path: str) -> PreTrainedConfig:
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path: {path!r} holds no config.json; give a local Hugging Face model directory")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise ConfigError(f"model.path: {path!r}: config.json cannot be read: {error}") from None
    return _checked(config, "model.path")


def _from_tree(tree: dict[str, Any], vocab_size: int, image_token_id: int) -> PreTrainedConfig:
    kind = tree.get("model_type")
    if kind is None:
        raise ConfigError(f"model.config.model_type: None is not supported; use one of {', '.join(FAMILIES)}")
    text: dict[str, Any] = {"vocab_size": vocab_size, "pad_token_id": None} | dict(tree.get("text_config") or {})
    vision = dict(tree.get("vision_config") or {})
    rest = {k: v for k, v in tree.items() if k not in ("model_type", "text_config", "vision_config")}
    try:
        config: Any = AutoConfig.for_model(kind, text_config=text, vision_config=vision, **rest)
    except Exception as error:
        raise ConfigError(f"model.config: transformers refuses it: {error}") from None
    checked = _checked(config, "model.config")
    config.image_token_id = image_token_id
    if hasattr(config, "image_seq_length"):
        config.image_seq_length = family_of(config).pictures(config).tokens
    if text["vocab_size"] < vocab_size:
        raise ConfigError(
            f"model.config.text_config.vocab_size: {text['vocab_size']} is smaller than the tokenizer's {vocab_size}; "
            "leave it out or raise it"
        )
    return checked


def _checked(config: PreTrainedConfig, key: str) -> PreTrainedConfig:
    _class_of(config)
    try:
        family_of(config).check(config)
    except ValueError as error:
        raise error if isinstance(error, ConfigError) else ConfigError(f"{key}.{error}") from None
    return config
