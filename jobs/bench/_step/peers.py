"""The peers' ways to spread one model over the ranks; the loop around them is that of the FSDP2 script."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from _peers.fsdp2 import Trainer


class DDP(Trainer):
    """``DistributedDataParallel``: whole copies, gradients averaged in buckets during the last backward pass."""

    def distribute(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model)

    def backward(self, batch: Mapping[str, Tensor], targets: Tensor, *, last: bool) -> Tensor:
        assert isinstance(self.model, DistributedDataParallel)
        with contextlib.nullcontext() if last else self.model.no_sync():
            loss = self._recipe.loss(self.model, batch) / targets
            (loss * self.world).backward()
        return loss.detach()


class Accelerate(Trainer):
    """Hugging Face Accelerate on CPUs, which is DDP inside, by its own calls."""

    def distribute(self, model: nn.Module) -> nn.Module:
        from accelerate import Accelerator

        # It takes the process group that there is, but looks for what a launcher would have said.
        ranks = {"RANK": self.rank, "WORLD_SIZE": self.world, "LOCAL_RANK": self.rank, "LOCAL_WORLD_SIZE": self.world}
        os.environ |= {name: str(value) for name, value in ranks.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        self._accelerator = Accelerator(cpu=True)
        if self._accelerator.num_processes != self.world:
            raise RuntimeError(f"Accelerate sees {self._accelerator.num_processes} of {self.world} processes")
        prepared: nn.Module = self._accelerator.prepare(model)
        return prepared

    def backward(self, batch: Mapping[str, Tensor], targets: Tensor, *, last: bool) -> Tensor:
        with contextlib.nullcontext() if last else self._accelerator.no_sync(self.model):
            loss = self._recipe.loss(self.model, batch) / targets
            self._accelerator.backward(loss * self.world)
        return loss.detach()

    def update(self) -> None:
        self._accelerator.clip_grad_norm_(self.model.parameters(), self._clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


class DeepSpeed(Trainer):
    """DeepSpeed, ZeRO-3: parameters, gradients and moments are sharded, as FSDP2 shards them."""

    def distribute(self, model: nn.Module) -> nn.Module:
        return model  # with its optimizer, at the first step

    def backward(self, batch: Mapping[str, Tensor], targets: Tensor, *, last: bool) -> Tensor:
        self._engine.set_gradient_accumulation_boundary(last)
        loss = self._recipe.loss(self._engine, batch) / targets
        # It averages over the ranks and over the micro-batches.
        self._engine.backward(loss * self.world * self._plan.count)
        if not last:
            self._engine.step()
        return loss.detach()

    def update(self) -> None:
        self._engine.step()  # clips

    def prepare(self) -> None:
        """Hand model and optimizer over."""
        import deepspeed

        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,  # for its own counts alone
            "gradient_accumulation_steps": self._plan.count,
            "gradient_clipping": self._clip,
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
        }
        deepspeed.init_distributed("gloo", dist_init_required=False, verbose=False)
        self._engine, *_ = deepspeed.initialize(
            model=self.model, optimizer=self.optimizer, config=config, dist_init_required=False
        )


def make(kind: str, work: Any) -> Trainer:
    """A peer by its name, ready for its first step."""
    trainer = {"fsdp2": Trainer, "ddp": DDP, "accelerate": Accelerate, "deepspeed": DeepSpeed}[kind](work)
    if isinstance(trainer, DeepSpeed):
        trainer.prepare()
    dist.barrier()
    torch.manual_seed(0)
    return trainer
