"""Any other class of image-text models: what can be found out from its structure, and one list of what cannot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from planaria.models.families.family import CLIP_STATISTICS, HALVES, Family, Pictures

TOWERS = ("model.vision_tower", "model.vision_model", "model.visual", "model.vision_encoder", "vision_model")
PROJECTORS = ("model.multi_modal_projector", "model.connector", "model.projector", "model.aligner")


def family_of(network: Any) -> Family:
    """A family for ``network``, an image-text model on the meta device, by the rules that most of them follow.

    Raises:
        ValueError: lists everything that these rules do not cover.
    """
    config = network.config
    tower = next((name for name in TOWERS if _has(network, name)), None)
    projectors = tuple(name for name in PROJECTORS if _has(network, name))
    problems = []
    if tower is None:
        problems.append(f"no vision tower under any of {', '.join(TOWERS)}")
    if not projectors:
        problems.append(f"no projector under any of {', '.join(PROJECTORS)}")
    if not hasattr(config, "text_config") or not hasattr(config, "vision_config"):
        problems.append("its config has no text_config and vision_config")
    if getattr(config, "image_token_id", None) is None:
        problems.append("its config names no image_token_id")
    if not isinstance(getattr(network, "lm_head", None), nn.Linear):
        problems.append("no output layer lm_head")
    side = _side(getattr(config, "vision_config", None))
    if side is None:
        problems.append("vision_config.image_size is not the side of a square")
    tokens = 0
    if not problems and side is not None:
        try:
            tokens = _tokens(network, side)
        except Exception as error:  # whatever a model does with inputs that are not the ones it needs
            problems.append(
                "its pictures need more than pixel_values [N, 3, S, S]: get_image_features fails "
                f"({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})"
            )
    problems += _hazards(network)
    if problems or tower is None or side is None:
        raise ValueError("; ".join(problems))
    statistics = HALVES if "siglip" in str(config.vision_config.model_type) else CLIP_STATISTICS
    pictures = Pictures(side, tokens, *statistics)
    return Family(vision=(tower,), projector=projectors, pictures=lambda _: pictures)


def _has(network: nn.Module, name: str) -> bool:
    try:
        return bool(network.get_submodule(name) is not None)
    except AttributeError:
        return False


def _side(vision: Any) -> int | None:
    size = getattr(vision, "image_size", None)
    if isinstance(size, (list, tuple)):
        size = size[0] if len(set(size)) == 1 else None
    return size if isinstance(size, int) else None


def _tokens(network: Any, side: int) -> int:
    with torch.no_grad(), torch.device("meta"):
        found = network.model.get_image_features(pixel_values=torch.zeros(1, 3, side, side)).pooler_output
    features = torch.cat(list(found), dim=0) if isinstance(found, (list, tuple)) else found.flatten(0, -2)
    return int(features.shape[0])


def _hazards(network: Any) -> Iterator[str]:
    """What this platform cannot train in any layout, or not without a family of its own."""
    for name, module in network.named_modules():
        if name.endswith("experts") or "moe" in type(module).__name__.lower():
            yield f"{name} is a mixture of experts"
            return
    scalars = [name for name, parameter in network.named_parameters() if parameter.dim() == 0]
    if scalars:
        yield f"{', '.join(scalars)} have no dimension to shard"
    text = getattr(network.config, "text_config", None)
    if str(getattr(text, "model_type", "")).startswith(("gemma3", "gemma2", "gemma4")):
        yield "its decoder builds masks from token types, which the collator does not make"
