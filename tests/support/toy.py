"""A small transformer in plain torch, with query and key norms, as a user might bring it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from planaria.recipe import Dataset, MicroBatch, ShardingRules


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(width, width, bias=name in ("v_proj", "o_proj")))
        self.q_norm, self.k_norm = nn.RMSNorm(self.size), nn.RMSNorm(self.size)

    def forward(self, x_BLH: Tensor) -> Tensor:
        q, k, v = (proj(x_BLH).unflatten(-1, (-1, self.size)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.q_norm(q), self.k_norm(k)
        mixed = nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(nn.functional.gelu(self.fc1(x)))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, heads), MLP(width)
        self.gate = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + torch.sigmoid(self.gate(x)) * self.mlp(self.norm2(x))


class Toy(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.enter = nn.Linear(3, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 5)
        # Drawn away from 1, where an error in the gradient of a norm might hide.
        for module in self.modules():
            if isinstance(module, nn.RMSNorm | nn.LayerNorm):
                nn.init.uniform_(module.weight, 0.5, 1.5)

    def forward(self, x_BLF: Tensor) -> Tensor:
        hidden = self.enter(x_BLF)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden)).mean(1)


class Points:
    """Sample ``index``: [length, 3] coordinates and a class of five."""

    def __init__(self, length: int, samples: int = 100) -> None:
        self.length, self.samples = length, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        dice = np.random.default_rng(index)
        return dice.normal(size=(self.length, 3)).astype(np.float32), int(dice.integers(5))


RULES = ShardingRules(
    units=("layers.0", "layers.1"),
    colwise=frozenset({"q_proj", "k_proj", "v_proj", "fc1"}),
    rowwise=frozenset({"o_proj", "fc2"}),
    replicate=frozenset({"gate"}),
    sequence_parallel=(("layers.0", "norm"),),
    heads={"heads": 4},
)


@dataclass
class ToyRecipe:
    """Implements the five methods of a recipe and no more: the model is built whole, on the CPU."""

    rules: ShardingRules = RULES
    length: int = 6
    width: int = 16
    heads: int = 4
    samples: int = 100

    def dataset(self, split: str) -> Dataset:
        return Points(self.length, self.samples)

    def collate(self, samples: Sequence[Any], weights: Sequence[int]) -> MicroBatch:
        arrays = {
            "x": np.stack([points for points, _ in samples]),
            "y": np.array([label for _, label in samples]),
            "weight": np.array(weights, dtype=np.float32),
        }
        return MicroBatch(arrays, targets=sum(weights))

    def build_model(self) -> nn.Module:
        return Toy(self.width, self.heads)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        losses = nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return (losses * batch["weight"]).sum()

    def sharding(self, model: nn.Module) -> ShardingRules:
        return self.rules


def rules(**changes: Any) -> ShardingRules:
    """The toy's rules with changes."""
    return dataclasses.replace(RULES, **changes)
