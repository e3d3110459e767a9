"""The losses of a job that nothing ever happens to: one process, no Ray, no controller."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tests.support.ranks import RankPool

from planaria.config import JobConfig, parse
from planaria.data.builder import BatchBuilder
from planaria.data.plan import micro_batch_plan
from planaria.engine.initial import first_state
from planaria.engine.native import NativeEngine
from planaria.layout import Layout
from planaria.models.vlm import VLMRecipe
from planaria.runtime.groups import Groups

ROOT = Path(__file__).resolve().parents[2]


def undisturbed_losses(job: JobConfig, steps: int) -> list[float]:
    """Loss of each of the first ``steps`` steps; some 25 ms per step of a tiny model.

    In a process of its own: the servers that start ranks would stay until the end of this one.
    """
    command = [sys.executable, "-m", "tests.support.undisturbed", str(steps)]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "platform")])
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths},
        input=json.dumps(job.model_dump(mode="json")),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    losses: list[float] = json.loads(done.stdout.splitlines()[-1])
    return losses


def _train(groups: Groups, job: JobConfig, steps: int) -> list[float]:
    recipe = VLMRecipe(job)
    engine = NativeEngine(recipe, job, Layout(), groups.mesh, torch.device("cpu"))
    engine.load(first_state(recipe, job))
    size = job.train.global_batch
    builder = BatchBuilder(recipe.dataset("train"), recipe.collate, job.seed, size, job.data.shuffle)
    plan = micro_batch_plan(size, 1, job.train.micro_batch)
    losses = []
    for step in range(steps):
        share = builder.build(step, *plan.slices[0], plan.count)
        targets = torch.tensor(sum(batch.targets for batch in share.micro_batches))
        dist.all_reduce(targets)
        losses.append(engine.train_step(share.micro_batches, int(targets), lambda: ()).loss)
    return losses


def _main() -> None:
    job = parse(json.load(sys.stdin))
    with RankPool(1) as pool:
        print(json.dumps(pool.run(Layout(), _train, job, int(sys.argv[1]))[0]))


if __name__ == "__main__":
    _main()
