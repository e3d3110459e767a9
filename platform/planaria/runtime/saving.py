"""A checkpoint as a collective act: every rank writes its shard, one commits, all know the outcome."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from planaria.config import JobConfig
from planaria.engine.native import NativeEngine
from planaria.state.errors import CheckpointError
from planaria.state.index import Slice
from planaria.state.vault import Vault


def save(
    engine: NativeEngine,
    vault: Vault,
    job: JobConfig,
    token: str,
    report: Callable[[dict[str, Any]], None],
    *,
    must: bool,
) -> bool:
    """Save the state after ``engine.step_done`` steps; returns whether it is durable now.

    Trouble on one rank (a full disk) is trouble for all: the attempt is removed, the older checkpoints stay.
    Training goes on if another attempt will follow; with ``must`` the error is raised, on every rank alike.
    """
    began = time.monotonic()
    step = engine.step_done
    report({"t": "phase", "step": step, "phase": "checkpoint"})
    writer = vault.writer(step, token)
    problem: str | None = None
    slices: list[Slice] = []
    try:
        slices = writer.write_shard(dist.get_rank(), engine.pieces())
    except CheckpointError as error:
        problem = str(error)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (problem, [item.to_json() for item in slices]))
    problem = next((trouble for trouble, _ in gathered if trouble), None)
    outcome: list[str | None] = [problem]
    if dist.get_rank() == 0:
        if problem:
            writer.abort()
        else:
            meta = {"layout": str(engine.layout), "job": job.model_dump(mode="json")}
            try:
                slices = [Slice.from_json(item) for _, items in gathered for item in items]
                writer.commit(slices, meta, expected=engine.expected())
            except CheckpointError as error:
                outcome = [str(error)]
    dist.broadcast_object_list(outcome, src=0)
    took = time.monotonic() - began
    if outcome[0] is None:
        report({"t": "checkpoint", "step": step, "took_s": took})
        return True
    report({"t": "checkpoint_failed", "step": step, "took_s": took, "problem": outcome[0]})
    if must:
        raise CheckpointError(outcome[0])
    return False
