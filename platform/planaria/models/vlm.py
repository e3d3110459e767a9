"""The vision-language recipe: an unmodified Hugging Face model, image-text data, captioning/VQA loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from planaria.config import ConfigError, JobConfig, ModelConfig
from planaria.data.collate import VLMCollator
from planaria.data.rows import Needs
from planaria.data.source import open_dataset
from planaria.data.tokens import TextCodec, load_tokenizer
from planaria.models import build, initialise
from planaria.models.families import Family
from planaria.models.families.family import Pictures
from planaria.models.lora import AdaptedState, add_adapters
from planaria.models.pretrained import PretrainedState
from planaria.models.rules import resume, sharding_rules, stage_rules
from planaria.objectives.captioning import exact_match, token_loss_sum
from planaria.recipe import Dataset, MicroBatch, ShardingRules, StageRules, StateReader

PAD_MULTIPLE = 8
"""Sequences are padded to a multiple of this and of tp x cp, so that all ranks get parts of the same length."""


class VLMRecipe:
    """Implements :class:`planaria.recipe.Recipe` for the model and data sections of a job.

    Raises:
        ConfigError: the job has no model section.
    """

    partial_logits = True

    def __init__(self, job: JobConfig) -> None:
        if job.model is None:
            raise ConfigError(
                "model: missing; add it (model: {preset: llava-tiny}), or give the trainer a recipe of your own"
            )
        self.job = job

    @property
    def _model(self) -> ModelConfig:
        assert self.job.model is not None  # checked at construction
        return self.job.model

    def __getstate__(self) -> dict[str, Any]:
        return {"job": self.job}  # the rest is derived, and not everything in it can be pickled

    @cached_property
    def codec(self) -> TextCodec:
        return load_tokenizer(self.job.data.tokenizer)

    @cached_property
    def config(self) -> Any:
        """The Hugging Face config; raises :class:`planaria.config.ConfigError`."""
        codec = self.codec
        config = build.hf_config(self._model, vocab_size=codec.vocab_size, image_token_id=codec.image_id)
        if config.image_token_id != codec.image_id:
            raise ConfigError(
                f"data.tokenizer: its image token is {codec.image_id}, but the model at {self._model.path!r} uses "
                f"{config.image_token_id}; give the tokenizer directory that belongs to the model"
            )
        if config.text_config.vocab_size < codec.vocab_size:
            raise ConfigError(
                f"data.tokenizer: it has {codec.vocab_size} ids, but the model at {self._model.path!r} embeds only "
                f"{config.text_config.vocab_size}; give the tokenizer directory that belongs to the model"
            )
        return config

    @cached_property
    def family(self) -> Family:
        """What is particular about the model's family."""
        return build.family_of(self.config)

    @cached_property
    def _pictures(self) -> Pictures:
        return self.family.pictures(self.config)

    @cached_property
    def _collator(self) -> VLMCollator:
        mean, std = build.pixel_statistics((self._pictures.mean, self._pictures.std), self._model.path)
        return VLMCollator(
            self.codec,
            image_tokens=self._pictures.tokens,
            image_size=self._pictures.side,
            mean=mean,
            std=std,
            max_length=self.job.data.max_length,
            pad_multiple=math.lcm(PAD_MULTIPLE, self.job.layout.tp * self.job.layout.cp),
            pack=self._pictures.pack,
        )

    def dataset(self, split: str) -> Dataset:
        needs = Needs(most_at_once=self._collator.most_pictures, side=self._pictures.side)
        return open_dataset(self.job.data, split, self._pictures.side, self.job.seed, needs)

    def collate(self, samples: Sequence[Any], weights: Sequence[int]) -> MicroBatch:
        return self._collator(samples, weights)

    def build_model(self) -> nn.Module:
        model = self.plain_model()
        if self._model.lora is not None:
            add_adapters(model, self._model.lora)
        return model

    def plain_model(self) -> nn.Module:
        """The model without adapters, as Hugging Face files know it."""
        return build.build_model(self.config, self.family, self._model.freeze)

    def init_module(self, model: nn.Module, name: str, module: nn.Module) -> None:
        initialise.init_module(model, name, module)

    def initial_state(self, job: JobConfig) -> StateReader | None:
        if self._model.path is None:
            return None
        with torch.device("meta"):
            plain = PretrainedState(self._model.path, self.plain_model())
            if self._model.lora is None:
                return plain
            shapes = {name: tuple(p.shape) for name, p in self.build_model().named_parameters()}
            return AdaptedState(plain, shapes, job.seed)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return token_loss_sum(model, batch)

    def sharding(self, model: nn.Module) -> ShardingRules:
        return sharding_rules(model, self.config, self.family)

    def stage_rules(self, model: nn.Module) -> StageRules:
        family = self.family
        pictures = dict.fromkeys((*family.vision, *family.projector), self._pictures.tokens)
        rules = stage_rules(model, self.config, family, {"": self.job.data.max_length} | pictures)
        if rules is None:
            raise ConfigError(
                f"layout.pp: {type(model).__name__} has no decoder to cut into stages, or one whose layers need more "
                "than the hidden states of the layer before (cross-attention, deepstack); set layout.pp=1"
            )
        return rules

    def resume(self, model: nn.Module, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        assert not args  # the losses name their arguments
        return resume(model, self.family, hidden, kwargs)

    def lr_scale(self, name: str) -> float:
        return self.job.optim.vision_lr_scale if self.family.part_of(name) == "vision" else 1.0

    def score(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return exact_match(model, batch)
