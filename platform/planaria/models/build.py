"""From a model section to a Hugging Face config and an unsharded model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig, LlavaConfig, LlavaForConditionalGeneration, PreTrainedConfig

from planaria.config import ConfigError, ModelConfig
from planaria.models.presets import PRESETS

SUPPORTED: dict[str, Any] = {"llava": LlavaForConditionalGeneration}
TOWERS = ("clip_vision_model", "siglip_vision_model")
DECODERS = ("llama", "qwen2")


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


def build_model(config: PreTrainedConfig, freeze: tuple[str, ...]) -> nn.Module:
    """The model, on the current default device; parts that cannot or shall not train are frozen."""
    network = SUPPORTED[config.model_type](config)
    network.config._attn_implementation = "sdpa"
    freeze_unused_tail(network)
    parts = {
        "vision": network.model.vision_tower,
        "projector": network.model.multi_modal_projector,
    }
    for part in freeze:
        if part == "language":
            network.model.language_model.requires_grad_(False)
            network.lm_head.requires_grad_(False)
        else:
            parts[part].requires_grad_(False)
    return network


def freeze_unused_tail(network: LlavaForConditionalGeneration) -> None:
    """Freeze tower parameters behind the feature layer: they never get a gradient, and would only be decayed."""
    tower, layer = network.model.vision_tower, network.config.vision_feature_layer
    chosen = layer if isinstance(layer, list) else [layer]
    layers = tower.encoder.layers
    # hidden_states[0] is the embedding, hidden_states[i] the output of layer i-1.
    last_used = max(index if index >= 0 else len(layers) + 1 + index for index in chosen)
    for unused in layers[last_used:]:
        unused.requires_grad_(False)
    for name in ("post_layernorm", "head"):
        module = getattr(tower, name, None)
        if isinstance(module, nn.Module):
            module.requires_grad_(False)


def image_tokens(config: PreTrainedConfig) -> int:
    """Placeholder tokens per picture."""
    vision = config.vision_config
    patches = (vision.image_size // vision.patch_size) ** 2
    class_token = 1 if vision.model_type == "clip_vision_model" else 0
    return int(patches + class_token - (1 if config.vision_feature_select_strategy == "default" else 0))


def pixel_statistics(config: PreTrainedConfig, path: str | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(mean, std) per channel: from the directory's preprocessor_config.json, else what the tower was made for."""
    if path is not None:
        file = Path(path) / "preprocessor_config.json"
        if file.exists():
            stored = json.loads(file.read_text(encoding="utf-8"))
            if "image_mean" in stored and "image_std" in stored:
                return tuple(stored["image_mean"]), tuple(stored["image_std"])
    if config.vision_config.model_type == "siglip_vision_model":
        return (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
    return (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


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
    if tree.get("model_type") not in SUPPORTED:
        raise ConfigError(
            f"model.config.model_type: {tree.get('model_type')!r} is not supported; use one of {', '.join(SUPPORTED)}"
        )
    text: dict[str, Any] = {"vocab_size": vocab_size, "pad_token_id": None} | dict(tree.get("text_config") or {})
    vision = dict(tree.get("vision_config") or {})
    rest = {k: v for k, v in tree.items() if k not in ("model_type", "text_config", "vision_config")}
    try:
        config = LlavaConfig(text_config=text, vision_config=vision, **rest)
    except Exception as error:
        raise ConfigError(f"model.config: transformers refuses it: {error}") from None
    config.image_token_id = image_token_id
    config.image_seq_length = image_tokens(config)
    if text["vocab_size"] < vocab_size:
        raise ConfigError(
            f"model.config.text_config.vocab_size: {text['vocab_size']} is smaller than the tokenizer's {vocab_size}; "
            "leave it out or raise it"
        )
    return _checked(config, "model.config")


def _checked(config: PreTrainedConfig, key: str) -> PreTrainedConfig:
    if config.model_type not in SUPPORTED:
        raise ConfigError(
            f"{key}: model_type {config.model_type!r} is not supported; use one of {', '.join(SUPPORTED)}"
        )
    for part, known in (("vision_config", TOWERS), ("text_config", DECODERS)):
        kind = getattr(config, part).model_type
        if kind not in known:
            raise ConfigError(f"{key}.{part}.model_type: {kind!r} is not supported; use one of {', '.join(known)}")
    vision = config.vision_config
    if vision.image_size % vision.patch_size:
        raise ConfigError(
            f"{key}.vision_config.image_size: {vision.image_size} is not a multiple of patch_size {vision.patch_size}"
        )
    layer, count = config.vision_feature_layer, vision.num_hidden_layers
    for index in layer if isinstance(layer, list) else [layer]:
        if not -count - 1 <= index <= count:  # entry 0 is the embedding, entry i the output of layer i-1
            raise ConfigError(
                f"{key}.vision_feature_layer: {index} is outside {-count - 1}..{count}, for a tower of {count} layers"
            )
    return config
