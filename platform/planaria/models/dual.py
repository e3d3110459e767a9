"""The dual-encoder recipe: an unmodified CLIP or SigLIP, image-caption pairs, a contrastive loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from planaria.config import ConfigError, JobConfig, ModelConfig
from planaria.data.pairs import PairCollator
from planaria.data.rows import Needs
from planaria.data.source import open_dataset
from planaria.data.tokens import TextCodec, load_tokenizer
from planaria.models import initialise
from planaria.models.build import pixel_statistics
from planaria.models.dual_config import build_dual, dual_config, init_logits
from planaria.models.families.family import CLIP_STATISTICS, HALVES
from planaria.models.pretrained import PretrainedState
from planaria.models.rules import sharding_rules
from planaria.objectives.contrastive import whole_batch_loss
from planaria.recipe import Contrast, Dataset, MicroBatch, ShardingRules, StateReader


class DualEncoderRecipe:
    """Implements :class:`planaria.recipe.ContrastiveRecipe` for the model and data sections of a job.

    Raises:
        ConfigError: the data would not be pairs, or the layout has an axis on which a dual encoder is not cut.
    """

    def __init__(self, job: JobConfig) -> None:
        assert job.model is not None, "planaria.models.choose.job_recipe() gives other jobs another recipe"
        scenes = job.data.scenes
        if job.data.source == "scenes" and (scenes.caption_fraction < 1 or scenes.text_only_fraction > 0):
            raise ConfigError(
                f"data.scenes: caption_fraction={scenes.caption_fraction:g}, text_only_fraction="
                f"{scenes.text_only_fraction:g}, but a dual encoder trains on pictures with captions alone; "
                "set data.scenes.caption_fraction=1 and data.scenes.text_only_fraction=0"
            )
        if job.layout.pp > 1 or job.layout.cp > 1:
            raise ConfigError(
                f"layout: pp={job.layout.pp}, cp={job.layout.cp}, but a dual encoder is cut neither into stages nor "
                "along its sequences; set both to 1, and use tp where one encoder is too large for a device"
            )
        if job.model.lora is not None:
            raise ConfigError("model.lora: a dual encoder trains without adapters; leave lora out")
        if job.engine.name == "deepspeed":
            raise ConfigError(
                "engine.name: deepspeed sees no pairs of other ranks and micro-batches, of which the loss of a dual "
                "encoder is made; set engine.name=native"
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
        return dual_config(self._model, self.codec)

    @cached_property
    def _collator(self) -> PairCollator:
        siglip = self.config.vision_config.model_type == "siglip_vision_model"
        mean, std = pixel_statistics(HALVES if siglip else CLIP_STATISTICS, self._model.path)
        return PairCollator(
            self.codec,
            image_size=self.config.vision_config.image_size,
            mean=mean,
            std=std,
            max_length=min(self.job.data.max_length, self.config.text_config.max_position_embeddings),
            # SigLIP pools at the last position, be it padding.
            pad_to_max=self.config.model_type == "siglip",
        )

    def dataset(self, split: str) -> Dataset:
        side = self.config.vision_config.image_size
        return open_dataset(self.job.data, split, side, self.job.seed, Needs(least=1, most=1, side=side))

    def collate(self, samples: Sequence[Any], weights: Sequence[int]) -> MicroBatch:
        return self._collator(samples, weights)

    def build_model(self) -> nn.Module:
        return build_dual(self.config, self._model.freeze)

    def init_module(self, model: nn.Module, name: str, module: nn.Module) -> None:
        initialise.init_module(model, name, module)
        if not name:
            init_logits(module, self.config)

    def initial_state(self, job: JobConfig) -> StateReader | None:
        if self._model.path is None:
            return None
        with torch.device("meta"):
            return PretrainedState(self._model.path, self.build_model())

    def encode(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        # A call of the model, not of its encoders: FSDP2 gathers the root's parameters for no other. The logits
        # that it makes of the micro-batch are dropped. There is no attention mask: CLIP's text encoder is causal
        # and pools where the text ends, and SigLIP was trained to attend to its padding.
        out = model(input_ids=batch["input_ids"], pixel_values=batch["pixel_values"])
        image_BD, text_BD = out.image_embeds, out.text_embeds
        if image_BD.dtype in (torch.bfloat16, torch.float16):  # of unit length only as far as these dtypes tell
            image_BD, text_BD = normalize(image_BD.float(), dim=-1), normalize(text_BD.float(), dim=-1)
        return image_BD, text_BD

    def contrast(self) -> Contrast:
        columns = self.job.contrastive.columns
        if self.config.model_type == "siglip":
            return Contrast("sigmoid", "logit_scale", "logit_bias", columns)
        return Contrast("softmax", "logit_scale", None, columns)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        image_BD, text_BD = self.encode(model, batch)
        contrast, rows = self.contrast(), batch["weights"] > 0
        log_scale = model.get_parameter(contrast.scale)
        bias = None if contrast.bias is None else model.get_parameter(contrast.bias)
        return whole_batch_loss(contrast, image_BD[rows], text_BD[rows], log_scale, bias)

    def bounds(self, name: str) -> tuple[float, float] | None:
        # As open_clip does after every update, after section 2.5 of the CLIP paper (arXiv:2103.00020).
        return (0.0, math.log(self.job.contrastive.max_scale)) if name == "logit_scale" else None

    def sharding(self, model: nn.Module) -> ShardingRules:
        return sharding_rules(model, self.config)

    def lr_scale(self, name: str) -> float:
        return self.job.optim.vision_lr_scale if name.startswith("vision_model.") else 1.0
