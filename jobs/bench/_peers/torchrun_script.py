"""What ``torchrun`` starts: the loop of the peers, restarted from the newest checkpoint."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from _peers.fsdp2 import Trainer
from _peers.work import Trace, Work


def newest(folder: Path) -> Path | None:
    """The newest complete checkpoint: ``.metadata`` is written last."""
    complete = [path.parent for path in folder.glob("step-*/.metadata")]
    return max(complete, default=None)


def main() -> None:
    """Train to the end, or until the first error."""
    work = Work(**json.loads(sys.argv[1]))
    dist.init_process_group("gloo", timeout=timedelta(minutes=30 if work.stock else 1))
    trace = Trace(work, dist.get_rank(), dist.get_world_size())
    trainer = Trainer(work)
    checkpoints = work.path / "checkpoints"
    last = newest(checkpoints)
    if last is not None:
        trainer.load(last)
    while trainer.steps_done < work.steps:
        loss = trainer.step()
        trace.step(trainer.steps_done, loss)
        if trainer.steps_done % work.checkpoint_every == 0 or trainer.steps_done == work.steps:
            trainer.save(checkpoints / f"step-{trainer.steps_done:06d}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
