"""What a rank process does for one contender: take its place, then steps on batches that are there already."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from _checkpoint.pool import Rank
from _peers.fsdp2 import Trainer
from _peers.work import Work
from planaria.config import parse
from planaria.data.collate import MicroBatch
from planaria.layout import Layout

BATCHES = 4
"""Different global batches, over and over."""
Step = Callable[[list[MicroBatch]], float]


def hold(me: Rank, contender: str, work: Work) -> None:
    """Become a rank of ``contender``: a peer's name, or ``planaria LAYOUT`` with the way to recompute after it."""
    name, _, rest = contender.partition(" ")
    _import(name)
    me.kept["before"] = _resident("VmRSS")
    layout, _, recompute = rest.partition(" ")
    if name == "planaria":
        me.kept["step"], share = _planaria(work, Layout.parse(layout), recompute or "none")
    else:
        from _step.peers import make

        trainer = make(name, work)
        me.kept["step"], share = trainer.step, trainer.batch
    me.kept["batches"] = [share(number) for number in range(BATCHES)]


def steps(me: Rank, count: int) -> dict[str, float]:
    """Seconds per step of ``count`` steps in a row, the last loss, and the most memory since the process took its
    place, beyond what it held then (MiB)."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    step, batches = me.kept["step"], me.kept["batches"]
    dist.barrier()
    began = time.perf_counter()
    loss = 0.0
    for number in range(count):
        loss = step(batches[number % BATCHES])
    took = time.perf_counter() - began
    return {"step": took / count, "loss": loss, "memory": (_resident("VmHWM") - me.kept["before"]) / 2**20}


def _planaria(work: Work, layout: Layout, recompute: str) -> tuple[Step, Callable[[int], list[MicroBatch]]]:
    """The native engine as a worker runs it, without the worker."""
    from planaria.data.batches import Batches
    from planaria.data.plan import micro_batch_plan
    from planaria.engine.initial import first_state
    from planaria.engine.make import make_engine
    from planaria.models.vlm import VLMRecipe
    from planaria.runtime.groups import mesh_axes

    tree = work.job("bench").model_dump(mode="json")
    tree["train"]["recompute"] = recompute
    job = parse(tree)
    recipe = VLMRecipe(job)
    axes = mesh_axes(layout)
    mesh = init_device_mesh("cpu", tuple(getattr(layout, axis) for axis in axes), mesh_dim_names=axes)
    engine = make_engine(recipe, job, layout, mesh, torch.device("cpu"))
    engine.load(first_state(recipe, job))
    plan = micro_batch_plan(job.train.global_batch, layout.dp, job.train.micro_batch)
    source = Batches(recipe, job)
    rank = dist.get_rank()

    def step(share: list[MicroBatch]) -> float:
        # As the training loop: how many targets the global batch has is asked of all ranks.
        targets = torch.tensor(sum(batch.targets for batch in share) if layout.speaks_for_replica(rank) else 0)
        dist.all_reduce(targets)
        return engine.train_step(share, int(targets)).loss

    lo, hi = plan.slices[layout.dp_rank(rank)]
    return step, lambda number: source.build(number, lo, hi, plan.count).micro_batches


def _import(name: str) -> None:
    """Load what a contender needs, so that its modules do not count as memory of the training."""
    import transformers.models.clip.modeling_clip
    import transformers.models.llama.modeling_llama
    import transformers.models.llava.modeling_llava  # noqa: F401

    if name == "deepspeed":
        os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"}
        import deepspeed

        # It would compile collectives over shared memory first, for minutes; all contenders are to use gloo.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    elif name == "accelerate":
        import accelerate  # noqa: F401
    assert Trainer  # imported above, with planaria's own modules


def _resident(key: str) -> int:
    """Bytes, by the kernel's count."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")
