"""LLaVA: a CLIP or SigLIP tower, a two-layer projector, any decoder that the generic rules cover."""

from __future__ import annotations

from typing import Any

from torch import nn

from planaria.models.families.family import CLIP_STATISTICS, HALVES, Family, Pictures

TOWERS = ("clip_vision_model", "siglip_vision_model")
DECODERS = ("llama", "qwen2", "mistral")


def _pictures(config: Any) -> Pictures:
    vision = config.vision_config
    patches = (vision.image_size // vision.patch_size) ** 2
    class_token = 1 if vision.model_type == "clip_vision_model" else 0
    tokens = patches + class_token - (1 if config.vision_feature_select_strategy == "default" else 0)
    mean, std = CLIP_STATISTICS if class_token else HALVES
    return Pictures(vision.image_size, tokens, mean, std)


def _check(config: Any) -> None:
    for part, known in (("vision_config", TOWERS), ("text_config", DECODERS)):
        kind = getattr(config, part).model_type
        if kind not in known:
            raise ValueError(f"{part}.model_type: {kind!r} is not supported; use one of {', '.join(known)}")
    vision = config.vision_config
    if vision.image_size % vision.patch_size:
        raise ValueError(
            f"vision_config.image_size: {vision.image_size} is not a multiple of patch_size {vision.patch_size}"
        )
    layer, count = config.vision_feature_layer, vision.num_hidden_layers
    for index in layer if isinstance(layer, list) else [layer]:
        if not -count - 1 <= index <= count:  # entry 0 is the embedding, entry i the output of layer i-1
            raise ValueError(
                f"vision_feature_layer: {index} is outside {-count - 1}..{count}, for a tower of {count} layers"
            )


def _freeze_unused(network: Any) -> None:
    """Freeze what is behind the feature layer: it never gets a gradient, and would only be decayed."""
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


FAMILY = Family(
    vision=("model.vision_tower",),
    projector=("model.multi_modal_projector",),
    pictures=_pictures,
    check=_check,
    freeze_unused=_freeze_unused,
)
