"""What a checkpoint of a job holds, told from the job alone: no groups, no weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from planaria.config import JobConfig
from planaria.engine.initial import DTYPES, build
from planaria.engine.optimizer import STATE_KEYS
from planaria.engine.protocol import GOOD_STEPS, SCALE, UPDATES
from planaria.exchange.errors import ExchangeError
from planaria.models.choose import job_recipe
from planaria.models.dual import DualEncoderRecipe
from planaria.models.hub_names import HubNames
from planaria.models.vlm import VLMRecipe


@dataclass(frozen=True)
class Contents:
    """The tensors of one job's checkpoints.

    Raises:
        ExchangeError: the job has no model section.
        ConfigError: its model or tokenizer is not there, or not usable.
    """

    job: JobConfig

    def __post_init__(self) -> None:
        if self.job.model is None:
            raise ExchangeError(
                f"job {self.job.name}: has no model section, so its model is the trainer's own recipe; only Hugging "
                "Face models can be exported and imported by this command"
            )

    @cached_property
    def plain(self) -> Contents:
        """The same without adapters: what Hugging Face files hold."""
        model = self.job.model
        if model is None or model.lora is None:
            return self
        return Contents(self.job.model_copy(update={"model": model.model_copy(update={"lora": None})}))

    @cached_property
    def recipe(self) -> VLMRecipe | DualEncoderRecipe:
        """The recipe that the job trains with."""
        return job_recipe(self.job)

    @cached_property
    def model(self) -> nn.Module:
        """The model on the meta device."""
        return build(self.recipe, self.job)

    @cached_property
    def names(self) -> HubNames:
        """Names in files and in the module."""
        return HubNames(self.model)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of master weights and optimizer state."""
        return DTYPES[self.job.train.precision]

    @cached_property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter by its name in the module; tied ones once, under their first name."""
        return {name: tuple(parameter.shape) for name, parameter in self.model.named_parameters()}

    def hub_shape(self, name: str) -> tuple[int, ...]:
        """Shape of parameter ``name`` as its class and files have it."""
        return () if name in self.names.scalars else self.parameters[name]

    @cached_property
    def trainable(self) -> frozenset[str]:
        """Names of the parameters that have optimizer state."""
        return frozenset(name for name, parameter in self.model.named_parameters() if parameter.requires_grad)

    @property
    def optimizer_keys(self) -> tuple[str, ...]:
        """Kinds of optimizer state that each trainable parameter has."""
        optim = self.job.optim
        return () if optim.name == "sgd" and not optim.momentum else STATE_KEYS[optim.name]

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of a complete checkpoint, as :meth:`NativeEngine.expected` gives them."""
        shapes: dict[str, tuple[int, ...]] = {UPDATES: ()}
        shapes |= {SCALE: (), GOOD_STEPS: ()} if self.job.train.precision == "fp16" else {}
        shapes |= {f"model/{name}": shape for name, shape in self.parameters.items()}
        for name, shape in self.parameters.items():
            if name in self.trainable:
                shapes |= {f"optim/{key}/{name}": shape for key in self.optimizer_keys}
        return shapes
