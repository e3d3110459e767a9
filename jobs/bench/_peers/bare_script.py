"""What the bare ``torchrun`` starts: a training loop whose batches a worker process builds ahead."""

from __future__ import annotations

import json
import sys

import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from _peers.fsdp2 import Trainer
from _peers.work import Trace, Work
from planaria.data.collate import MicroBatch


class Batches(Dataset[list[MicroBatch]]):
    """This rank's share of every step."""

    def __init__(self, trainer: Trainer, steps: int) -> None:
        self._trainer, self._steps = trainer, steps

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, step: int) -> list[MicroBatch]:
        return self._trainer.batch(step)


def main() -> None:
    """Train to the end."""
    work = Work(**json.loads(sys.argv[1]))
    dist.init_process_group("gloo")
    trace = Trace(work, dist.get_rank(), dist.get_world_size())
    trainer = Trainer(work)
    for share in DataLoader(Batches(trainer, work.steps), batch_size=None, num_workers=1, prefetch_factor=2):
        loss = trainer.step(share)
        trace.step(trainer.steps_done, loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
