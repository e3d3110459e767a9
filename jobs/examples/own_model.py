"""Train your own torch module elastically: a small vision transformer that tells which way stripes run.

``python jobs/examples/own_model.py`` trains it on this machine; docs/custom_models.md explains every part.
"""

from dataclasses import dataclass

import numpy as np
import torch
from ray.train import ScalingConfig
from torch import nn

from planaria import ElasticTrainer, MicroBatch, ShardingRules

ANGLES = ("0 degrees", "45 degrees", "90 degrees", "135 degrees")
SIZE, PATCH, WIDTH = 16, 4, 32


@dataclass
class Stripes:
    pixels: np.ndarray  # float32 [1, SIZE, SIZE]
    label: int
    choices: tuple[str, ...] = ANGLES  # lets the evaluation print chance beside the accuracy


class StripesDataset:  # anything with a length and an index; a sample is the same in every process
    def __init__(self, split):
        self.first, self.length = (0, 4000) if split == "train" else (1_000_000, 200)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        dice = np.random.default_rng(self.first + index)
        label = int(dice.integers(len(ANGLES)))
        y, x = np.mgrid[:SIZE, :SIZE]
        along = x * np.cos(np.pi * label / 4) + y * np.sin(np.pi * label / 4)
        waves = np.sin(along * dice.uniform(0.8, 1.4) + dice.uniform(0, 6.3)) + dice.normal(size=(SIZE, SIZE))
        return Stripes(waves[None].astype(np.float32), label)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, num_heads=4, batch_first=True)
        self.mlp = nn.Sequential()  # a module of its own: tensor parallelism works at its boundary
        self.mlp.up, self.mlp.act, self.mlp.down = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, stride=PATCH)
        self.places = nn.Parameter(torch.zeros(16, WIDTH))
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, len(ANGLES))

    def forward(self, pixels):
        x = self.patches(pixels).flatten(2).transpose(1, 2) + self.places
        return self.head(self.blocks(x).mean(1))


class StripesRecipe:
    def dataset(self, split):
        return StripesDataset(split)

    def collate(self, samples, weights):
        pixels, labels = np.stack([s.pixels for s in samples]), np.array([s.label for s in samples])
        arrays = {"pixels": pixels, "labels": labels, "weights": np.array(weights, dtype=np.float32)}
        return MicroBatch(arrays, targets=sum(weights))

    def build_model(self):
        return Classifier()

    def loss(self, model, batch):  # a sum: the platform divides it by the targets of the whole global batch
        losses = nn.functional.cross_entropy(model(batch["pixels"]).float(), batch["labels"], reduction="none")
        return (losses * batch["weights"]).sum()

    def score(self, model, batch):  # optional: the held-out evaluation
        return (model(batch["pixels"]).argmax(-1) == batch["labels"]).double()

    def sharding(self, model):  # ShardingRules() would do: only tensor parallelism needs to know the layers
        names = {"colwise": {"up"}, "rowwise": {"down"}, "replicate": {"attention"}}
        return ShardingRules(units=("blocks.0", "blocks.1"), **{kind: frozenset(n) for kind, n in names.items()})


JOB = {"name": "own-model", "train": {"steps": 150, "global_batch": 32, "micro_batch": 16}, "optim": {"lr": 3e-3}}

if __name__ == "__main__":
    trainer = ElasticTrainer(JOB, ScalingConfig(num_workers=(1, 2)), recipe=StripesRecipe())
    print(trainer.fit().metrics)
