"""Low-rank adapters out of a checkpoint: merged into the weights, or by themselves as peft saves them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from planaria.config import LoraConfig
from planaria.exchange.contents import Contents
from planaria.exchange.errors import ExchangeError
from planaria.exchange.folder import appearing, check_target
from planaria.models.lora import ADAPTER, BASE, adapted_layers, is_adapter, peft_config
from planaria.models.vlm import VLMRecipe
from planaria.state.checkpoint import Checkpoint

WEIGHTS, PREFIX = "adapter_model.safetensors", "base_model.model."


def merged(checkpoint: Checkpoint, contents: Contents, name: str) -> torch.Tensor:
    """Parameter ``name`` of the model without adapters: ``W + alpha / rank * B A`` where a layer has one."""
    owner, _, leaf = name.rpartition(".")
    stored = f"{owner}{BASE}{leaf}"
    if stored not in contents.parameters:
        return checkpoint.read(f"model/{name}")
    base = checkpoint.read(f"model/{stored}")
    if leaf != "weight":
        return base
    first, second = (checkpoint.read(f"model/{owner}.lora_{factor}.{ADAPTER}.weight") for factor in "AB")
    lora = _lora(contents)
    return base + lora.alpha / lora.rank * (second @ first)


def export_adapters(checkpoint: Checkpoint, contents: Contents, to: str | Path, *, force: bool = False) -> Path:
    """Write the adapters alone as the directory ``to``, which ``peft.PeftModel.from_pretrained`` puts on the base.

    Raises:
        CheckpointDamaged: a slice is not what was written.
        ExchangeError: the job has no adapters, or ``to`` cannot be used.
    """
    lora, target = _lora(contents), Path(to).expanduser().absolute()
    check_target(target, force)
    recipe = contents.recipe
    assert isinstance(recipe, VLMRecipe)  # no other takes adapters
    with torch.device("meta"):
        config = peft_config(adapted_layers(recipe.plain_model(), lora), lora)
    config.base_model_name_or_path = contents.job.model.path if contents.job.model is not None else None
    config.inference_mode = True
    tensors = {
        PREFIX + name.replace(f".{ADAPTER}.", "."): checkpoint.read(f"model/{name}")
        for name in contents.parameters
        if is_adapter(name)
    }
    with appearing(target, force, sum(tensor.nbytes for tensor in tensors.values())) as folder:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        config.save_pretrained(str(folder))
    return target


def _lora(contents: Contents) -> LoraConfig:
    model = contents.job.model
    if model is None or model.lora is None:
        raise ExchangeError(f"job {contents.job.name}: trains no adapters (model.lora); export the whole model")
    return model.lora
