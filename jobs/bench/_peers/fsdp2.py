"""The peers' training loop: FSDP2, AdamW and distributed checkpoints, as PyTorch's own tutorials write them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from _peers.work import Work
from planaria.data.builder import BatchBuilder
from planaria.data.collate import MicroBatch
from planaria.data.plan import micro_batch_plan
from planaria.engine.batches import to_device
from planaria.models.vlm import VLMRecipe


class Trainer:
    """One rank. The default process group exists already."""

    def __init__(self, work: Work) -> None:
        job = work.job("peer")
        recipe = VLMRecipe(job)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.steps_done = 0
        torch.manual_seed(job.seed)
        self._recipe, self._clip = recipe, job.optim.clip_norm or float("inf")
        self.model = self.distribute(recipe.build_model())
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            trained, lr=job.optim.lr, betas=job.optim.betas, eps=job.optim.eps, weight_decay=job.optim.weight_decay
        )
        self._batches = BatchBuilder(
            recipe.dataset("train"), recipe.collate, job.seed, job.train.global_batch, job.data.shuffle
        )
        self._plan = micro_batch_plan(job.train.global_batch, self.world, job.train.micro_batch)

    def distribute(self, model: nn.Module) -> nn.Module:
        """The model, spread over the ranks."""
        mesh = init_device_mesh("cpu", (self.world,))
        for unit in self._recipe.sharding(model).units:
            fully_shard(model.get_submodule(unit), mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    def backward(self, batch: Mapping[str, Tensor], targets: Tensor, *, last: bool) -> Tensor:
        """Add up gradients of the batch's share of the mean loss, reduced after the ``last``; returns the share."""
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(last)
        loss = self._recipe.loss(self.model, batch) / targets
        (loss * self.world).backward()  # FSDP2 averages over the ranks
        return loss.detach()

    def update(self) -> None:
        """Clip the gradients, apply and clear them."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def batch(self, step: int) -> list[MicroBatch]:
        """This rank's share of a global batch."""
        lo, hi = self._plan.slices[self.rank]
        return self._batches.build(step, lo, hi, self._plan.count).micro_batches

    def step(self, share: list[MicroBatch] | None = None) -> float:
        """One optimizer step on ``share``, or on one built here and now; returns the mean loss per target over the
        global batch."""
        share = self.batch(self.steps_done) if share is None else share
        targets = torch.tensor(sum(batch.targets for batch in share))
        dist.all_reduce(targets)
        total = torch.zeros(())
        for index, batch in enumerate(share):
            arrays = to_device(batch, torch.device("cpu"))
            total += self.backward(arrays, targets, last=index == len(share) - 1)
        self.update()
        dist.all_reduce(total)
        self.steps_done += 1
        return float(total)

    def save(self, folder: str | Path) -> None:
        """Write a sharded checkpoint; every rank its own part, straight to the shared folder."""
        writer = dcp.FileSystemWriter(folder, sync_files=False)
        dcp.save(self._state(), storage_writer=writer)

    def load(self, folder: str | Path) -> None:
        """Continue from a checkpoint that any number of ranks wrote."""
        state = self._state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.steps_done = int(state["steps_done"])

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "steps_done": torch.tensor(self.steps_done)}
