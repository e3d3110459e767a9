"""Initialise one part of a Hugging Face model exactly as its own code would."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from planaria.models.lora import reset_adapters


def init_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Initialise ``module``, a materialised copy of ``model``'s submodule ``name``, buffers included.

    Every module is initialised by the nearest :class:`PreTrainedModel` above it, children first, as
    ``PreTrainedModel.initialize_weights`` does for a whole model.
    """
    _apply(module, module if isinstance(module, PreTrainedModel) else _owner(model, name))


def _owner(model: nn.Module, name: str) -> PreTrainedModel:
    parts = name.split(".")
    for depth in range(len(parts), -1, -1):
        candidate = model.get_submodule(".".join(parts[:depth]))
        if isinstance(candidate, PreTrainedModel):
            return candidate
    raise TypeError(f"{type(model).__name__} has no PreTrainedModel above {name!r}")


def _apply(module: nn.Module, owner: PreTrainedModel) -> None:
    for child in module.children():
        _apply(child, child if isinstance(child, PreTrainedModel) else owner)
    owner._init_weights(module)
    reset_adapters(module)
