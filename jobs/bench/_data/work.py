"""What every contender makes of a pair, so that only the ways there differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from planaria.data.collate import VLMCollator
from planaria.data.images import normalise
from planaria.data.rows import Needs
from planaria.data.sample import Sample
from planaria.data.tokens import load_tokenizer
from planaria.data.webdataset import WebDataset
from planaria.recipe import Dataset, MicroBatch, ShardingRules

PROMPT = "Describe the picture."
IMAGE_SIZE, PATCH = 224, 14
MEAN, STD = (0.481, 0.458, 0.408), (0.269, 0.261, 0.276)


def collator() -> VLMCollator:
    """Pictures to float32 [N, 3, 224, 224], captions to byte tokens."""
    return VLMCollator(load_tokenizer("bytes"), (IMAGE_SIZE // PATCH) ** 2, IMAGE_SIZE, MEAN, STD, max_length=512)


def batch_of(
    pictures: Sequence[NDArray[np.uint8]], captions: Sequence[str], collate: VLMCollator
) -> dict[str, NDArray[Any]]:
    """One batch from decoded pictures (uint8 [H, W, 3]) and captions, scaled, as loaders usually make it."""
    rows = zip(pictures, captions, strict=True)
    samples = [Sample(str(row), picture, PROMPT, caption) for row, (picture, caption) in enumerate(rows)]
    arrays: dict[str, NDArray[Any]] = dict(collate(samples, [1] * len(samples)).arrays)
    arrays["pixel_values"] = normalise(arrays["pixel_values"], MEAN, STD)
    return arrays


@dataclass
class Pairs:
    """The same work as a recipe; there is no model to train."""

    pattern: str

    def __post_init__(self) -> None:
        self._collate = collator()

    def dataset(self, split: str) -> Dataset:
        return WebDataset(self.pattern, PROMPT, needs=Needs(side=IMAGE_SIZE))

    def collate(self, samples: Sequence[Any], weights: Sequence[int]) -> MicroBatch:
        return self._collate(samples, weights)

    def build_model(self) -> nn.Module:
        raise NotImplementedError("nothing is trained here")

    def loss(self, model: nn.Module, batch: Any) -> Any:
        raise NotImplementedError("nothing is trained here")

    def sharding(self, model: nn.Module) -> ShardingRules:
        return ShardingRules()
