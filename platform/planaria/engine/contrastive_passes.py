"""Micro-batches whose losses see each other: exact gradients of a contrastive loss over the global batch.

GradCache (arXiv:2101.06983): the features of all micro-batches come first, without a graph; from them, and those of
all other ranks, the gradient of the loss with respect to each feature; then every micro-batch goes through the model
once more and carries the gradient of its own features backward. Memory for activations stays that of one micro-batch.
The last micro-batch keeps its graph, so a step of a single one costs nothing extra.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from planaria.engine.passes import AccumulatedPasses, At
from planaria.engine.row_blocks import RowBlocks
from planaria.engine.sharded import Shard
from planaria.layout import Layout
from planaria.objectives.contrastive import FeatureLoss, own_rows_loss
from planaria.recipe import ContrastiveRecipe, Recipe

Features = tuple[Tensor, Tensor]
"""Of images and of texts, each [B, D]."""


class ContrastivePasses(AccumulatedPasses):
    """Two passes over the micro-batches of a step; see the module."""

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        units: Sequence[FSDPModule],
        layout: Layout,
        mesh: DeviceMesh,
        shards: Sequence[Shard],
        *,
        counts_loss: bool,
    ) -> None:
        super().__init__(recipe, model, units, layout, counts_loss=counts_loss)
        # Among what CLIP returns is a transposed view of its logits; nobody writes into it.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        assert isinstance(recipe, ContrastiveRecipe)
        self._encoder: ContrastiveRecipe = recipe
        self._contrast = recipe.contrast()
        self._blocks = RowBlocks(mesh, self._contrast.columns)
        self._shard_group = mesh.get_group("dp_shard")
        by_name = {shard.name: shard for shard in shards}
        names = {"scale": self._contrast.scale} | ({"bias": self._contrast.bias} if self._contrast.bias else {})
        self._own = {role: by_name[name] for role, name in names.items()}

    def run(self, batches: Sequence[Mapping[str, Tensor]], scale: float, at: At) -> Tensor:
        """See :meth:`planaria.engine.passes.Passes.run`."""
        own = self._own_parameters()
        last = len(batches) - 1
        states, features = [], []
        for index, batch in enumerate(batches[:last]):
            at("step", index)
            states.append(_random_state(batch))
            with torch.no_grad():
                features.append(self._encoder.encode(self._model, batch))
        at("step", last)
        live = self._encoder.encode(self._model, batches[last])
        features.append((live[0].detach(), live[1].detach()))

        weighted = [batch["weights"] > 0 for batch in batches]
        found = self._loss(features, weighted, own)
        sizes = [int(rows.sum()) for rows in weighted]
        to_images, to_texts = found.image_ND.split(sizes), found.text_ND.split(sizes)

        for done, index in enumerate([last, *range(last)]):
            at("step", last + 1 + done)
            self._reduce_gradients(last=done == last)
            if index != last:
                _set_random_state(batches[index], states[index])  # the same dropout as before
                live = self._encoder.encode(self._model, batches[index])
            rows = weighted[index]
            loss = (live[0][rows] * to_images[index]).sum() + (live[1][rows] * to_texts[index]).sum()
            if done == 0:
                loss = loss + self._share_of_own(found)
            (loss * scale).backward()
        # Ranks of one tensor-parallel group compute the same loss; it counts once.
        return found.loss if self._counts_loss else torch.zeros_like(found.loss)

    def _loss(self, features: Sequence[Features], weighted: Sequence[Tensor], own: Mapping[str, Tensor]) -> FeatureLoss:
        image_ND = torch.cat([images[rows] for (images, _), rows in zip(features, weighted, strict=True)])
        text_ND = torch.cat([texts[rows] for (_, texts), rows in zip(features, weighted, strict=True)])
        log_scale = own["scale"].to(image_ND)
        bias = own["bias"].to(image_ND) if "bias" in own else torch.zeros_like(log_scale)
        return own_rows_loss(self._contrast.kind, image_ND, text_ND, log_scale, bias, self._blocks)

    def _own_parameters(self) -> dict[str, Tensor]:
        """The loss's own parameters as scalars, in the dtype of the master weights: a scale near 100 rounded to
        bf16 would be off by more than a step moves it."""
        values = torch.zeros(len(self._own), dtype=torch.float64, device=self._own["scale"].local().device)
        for place, shard in enumerate(self._own.values()):
            if not shard.box.empty:
                values[place] = shard.local().reshape(())
        dist.all_reduce(values, group=self._shard_group)
        return dict(zip(self._own, values, strict=True))

    def _share_of_own(self, found: FeatureLoss) -> Tensor:
        """A term whose gradient is this rank's share of that of the loss's own parameters, so that it is reduced
        like any other; the forward pass has left the root unit, where they live, gathered."""
        term = torch.zeros_like(found.scale)
        for role, shard in self._own.items():
            parameter = self._model.get_parameter(shard.name)
            if parameter.requires_grad:
                share: Tensor = getattr(found, role)
                term = term + (parameter * share.to(parameter.dtype)).sum().to(term.dtype)
        return term


def _random_state(batch: Mapping[str, Tensor]) -> Tensor:
    device = batch["weights"].device
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(batch: Mapping[str, Tensor], state: Tensor) -> None:
    device = batch["weights"].device
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
