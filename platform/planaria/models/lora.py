"""Low-rank adapters by peft: which layers get them, what they are before the first step, and names without them.

Only layers that would train get an adapter: not those of a frozen part, nor the tail of a tower that nothing reads
(peft itself goes by names alone, and towers and decoders share them). All else is frozen then.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from planaria.config import ConfigError, LoraConfig
from planaria.recipe import StateReader
from planaria.state.boxes import Box

ADAPTER = "default"
"""peft's name for the only one."""
BASE = ".base_layer."


def add_adapters(model: nn.Module, lora: LoraConfig) -> None:
    """Put adapters into ``model``, which may be on the meta device, and freeze everything else.

    Raises:
        ConfigError: no layer that trains has one of the wanted names.
    """
    from peft import inject_adapter_in_model

    inject_adapter_in_model(peft_config(adapted_layers(model, lora), lora), model, adapter_name=ADAPTER)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))


def peft_config(layers: list[str], lora: LoraConfig) -> Any:
    """The ``peft.LoraConfig`` of adapters in ``layers``."""
    from peft import LoraConfig as PeftConfig

    alpha: Any = lora.alpha  # annotated as int, and divided by the rank
    return PeftConfig(r=lora.rank, lora_alpha=alpha, lora_dropout=lora.dropout, target_modules=layers, bias="none")


def adapted_layers(model: nn.Module, lora: LoraConfig) -> list[str]:
    """Names of the linear layers of ``model``, which has no adapters yet, that get one."""
    found = [
        f"{unit}.{name}"
        for unit, layer in model.named_modules()
        if isinstance(layer, GradientCheckpointingLayer)
        for name, module in layer.named_modules()
        if type(module) is nn.Linear and module.weight.requires_grad
    ]
    leaves = {name.rpartition(".")[2] for name in found}
    if unknown := [target for target in lora.targets if target not in leaves]:
        raise ConfigError(
            f"model.lora.targets: no layer that trains is called {', '.join(unknown)}; there are "
            f"{', '.join(sorted(leaves)) or 'none: model.freeze leaves nothing'}"
        )
    if not found:
        raise ConfigError("model.lora: model.freeze leaves no layer to put adapters into; leave a part out of it")
    return [name for name in found if not lora.targets or name.rpartition(".")[2] in lora.targets]


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def without_adapters(name: str) -> str:
    """Name that a parameter of the model has where there are no adapters."""
    return name.replace(BASE, ".")


def reset_adapters(module: nn.Module) -> None:
    """The first values of an adapter in ``module``, if it is a layer that has one: no change of the model."""
    from peft.tuners.lora import LoraLayer

    if isinstance(module, LoraLayer):
        module.reset_lora_parameters(ADAPTER, True)


class AdaptedState:
    """Implements :class:`planaria.recipe.StateReader`: weights of a model without adapters, and fresh adapters.

    Args:
        base: the weights, under the names of the model without adapters.
        shapes: shape of every parameter of the model with adapters.
        seed: of the adapters, the same on every rank.
    """

    step = 0

    def __init__(self, base: StateReader, shapes: dict[str, tuple[int, ...]], seed: int) -> None:
        self._base, self._shapes, self._seed = base, shapes, seed

    def read(self, tensor: str, box: Box) -> Tensor:
        """Part ``box`` of ``model/NAME``; raises KeyError for anything else."""
        kind, _, name = tensor.partition("/")
        if kind != "model" or not is_adapter(name):
            return self._base.read(without_adapters(tensor), box)
        whole = torch.zeros(self._shapes[name])
        if ".lora_A." in name:
            digest = hashlib.blake2b(f"{self._seed}:{name}".encode(), digest_size=8).digest()
            dice = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=dice)
        return whole[box.relative_to(Box.whole(whole.shape))]
