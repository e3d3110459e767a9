"""The vision-language recipe: an unmodified Hugging Face model, image-text data, captioning/VQA loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from planaria.config import ConfigError, JobConfig
from planaria.data.collate import VLMCollator
from planaria.data.source import open_dataset
from planaria.data.tokens import TextCodec, load_tokenizer
from planaria.models import build, initialise
from planaria.models.rules import sharding_rules
from planaria.objectives.captioning import exact_match, token_loss_sum
from planaria.recipe import Dataset, MicroBatch, ShardingRules

PAD_MULTIPLE = 8
"""Sequences are padded to a multiple of this, so that sequence parallelism divides them."""


class VLMRecipe:
    """Implements :class:`planaria.recipe.Recipe` for the model and data sections of a job."""

    def __init__(self, job: JobConfig) -> None:
        self.job = job

    def __getstate__(self) -> dict[str, Any]:
        return {"job": self.job}  # the rest is derived, and not everything in it can be pickled

    @cached_property
    def codec(self) -> TextCodec:
        return load_tokenizer(self.job.data.tokenizer)

    @cached_property
    def config(self) -> Any:
        """The Hugging Face config; raises :class:`planaria.config.ConfigError`."""
        codec = self.codec
        config = build.hf_config(self.job.model, vocab_size=codec.vocab_size, image_token_id=codec.image_id)
        if config.image_token_id != codec.image_id:
            raise ConfigError(
                f"data.tokenizer: its image token is {codec.image_id}, but the model at {self.job.model.path!r} uses "
                f"{config.image_token_id}; give the tokenizer directory that belongs to the model"
            )
        return config

    @cached_property
    def _collator(self) -> VLMCollator:
        mean, std = build.pixel_statistics(self.config, self.job.model.path)
        return VLMCollator(
            self.codec,
            image_tokens=build.image_tokens(self.config),
            image_size=self.config.vision_config.image_size,
            mean=mean,
            std=std,
            max_length=self.job.data.max_length,
            pad_multiple=PAD_MULTIPLE,
        )

    def dataset(self, split: str) -> Dataset:
        return open_dataset(self.job.data, split, self.config.vision_config.image_size, self.job.seed)

    def collate(self, samples: Sequence[Any], weights: Sequence[int]) -> MicroBatch:
        return self._collator(samples, weights)

    def build_model(self) -> nn.Module:
        return build.build_model(self.config, self.job.model.freeze)

    def init_module(self, model: nn.Module, name: str, module: nn.Module) -> None:
        initialise.init_module(model, name, module)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return token_loss_sum(model, batch)

    def sharding(self, model: nn.Module) -> ShardingRules:
        return sharding_rules(model, self.config)

    def lr_scale(self, name: str) -> float:
        return self.job.optim.vision_lr_scale if ".vision_tower." in f".{name}" else 1.0

    def score(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return exact_match(model, batch)
