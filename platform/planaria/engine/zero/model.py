"""The model as DeepSpeed takes it: one module whose forward pass is the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from planaria.config import JobConfig
from planaria.engine.initial import restore_buffers
from planaria.recipe import MetaRecipe, Recipe, ScoredRecipe


class LossModule(nn.Module):
    """Forward is the recipe's loss, so that whatever shape the model's output has, DeepSpeed sees one scalar.

    Its hooks prepare the backward pass at the output of the module that it was given.
    """

    def __init__(self, recipe: Recipe, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._recipe = recipe

    def forward(self, batch: Mapping[str, Tensor], scoring: bool = False) -> Tensor:
        """Sum of the losses of the batch, or with ``scoring`` the score of every row."""
        if scoring:
            assert isinstance(self._recipe, ScoredRecipe)
            return self._recipe.score(self.model, batch)
        return self._recipe.loss(self.model, batch)


def materialise(
    model: nn.Module, recipe: Recipe, job: JobConfig, device: torch.device, deepspeed: Any, config: dict[str, Any]
) -> None:
    """Put the recipe's model on ``device``; its weights are not yet those of any state.

    With ZeRO-3 each unit is cut as soon as it has memory, so that no rank ever holds the whole model.
    """
    meta = isinstance(recipe, MetaRecipe)
    known: dict[int, nn.Parameter] = {}
    units = sorted(recipe.sharding(model).units)
    for part in [*(model.get_submodule(unit) for unit in units), model]:
        if meta:
            _give_memory(part, device, known)
        else:
            part.to(device)
        if config["zero_optimization"]["stage"] == 3:
            dtype = torch.bfloat16 if job.train.precision == "bf16" else torch.float32
            with torch.no_grad():
                deepspeed.zero.Init(module=part, config_dict_or_path=config, dtype=dtype)
    if isinstance(recipe, MetaRecipe):
        restore_buffers(recipe, job, model)
    if job.train.precision == "bf16":
        model.register_forward_pre_hook(_cast_inputs, with_kwargs=True)


def _give_memory(module: nn.Module, device: torch.device, known: dict[int, nn.Parameter]) -> None:
    """Replace meta parameters and buffers by ones with memory; one parameter under two names stays one."""
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in known:
                    # Zeros: DeepSpeed copies them about before there is a state to load.
                    values = torch.zeros_like(parameter, device=device)
                    known[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
                owner._parameters[name] = known[id(parameter)]
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_meta:
                owner._buffers[name] = torch.zeros_like(buffer, device=device)


def _cast_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    def cast(value: Any) -> Any:
        return value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value

    return tuple(map(cast, args)), {key: cast(value) for key, value in kwargs.items()}
