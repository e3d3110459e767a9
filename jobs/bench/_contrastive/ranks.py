"""Processes that hold features and measure what a loss needs beside them."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import normalize

from _contrastive.contenders import LOSSES, open_clip, open_clip_module, planaria

MIB = 1 << 20


@dataclass(frozen=True)
class Work:
    """What is measured.

    Attributes:
        pairs: per rank, so that the global batch grows with the world.
        dim: of a feature.
        columns: of a block; planaria only.
        rounds: measurements of each contender, in turns.
    """

    pairs: int
    dim: int
    columns: int
    rounds: int


def measure(world: int, work: Work) -> list[dict[str, Any]]:
    """Rows of all contenders and rounds on ``world`` processes; the largest figure of all ranks counts."""
    # Large tensors go straight to the kernel and back, so that resident memory is what is in use.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (world, folder, work), nprocs=world)
        rows: list[dict[str, Any]] = torch.load(Path(folder, "rows.pt"))
        return rows


def _rank(rank: int, world: int, folder: str, work: Work) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (1, world, 1), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    torch.manual_seed(rank)
    image, text = (normalize(torch.randn(work.pairs, work.dim), dim=1) for _ in range(2))
    rows: list[dict[str, Any]] = []
    for kind in LOSSES:
        contenders = {"planaria": planaria(kind, mesh, work.columns)}
        try:
            contenders["open_clip"] = open_clip(kind, open_clip_module())
        except ImportError as error:
            rows.append({"world": world, "loss": kind, "contender": "open_clip", "absent": str(error)})
        gradients = {name: torch.cat(run(image, text)) for name, run in contenders.items()}  # connects, allocates
        error = torch.zeros(())
        if "open_clip" in gradients:
            ours, theirs = gradients["planaria"], gradients["open_clip"]
            error = (ours - theirs).abs().max() / theirs.abs().max()
        del gradients
        for number in range(work.rounds):
            for name, run in contenders.items():
                used, seconds = _watched(lambda run=run: run(image, text))
                figures = torch.tensor([used, seconds, float(error)], dtype=torch.float64)
                dist.all_reduce(figures, dist.ReduceOp.MAX)
                row = {"world": world, "loss": kind, "contender": name, "round": number}
                rows.append(row | dict(zip(("mib", "seconds", "difference"), figures.tolist(), strict=True)))
    if rank == 0:
        torch.save(rows, Path(folder, "rows.pt"))
    dist.barrier()
    dist.destroy_process_group()


def _watched(run: Callable[[], object]) -> tuple[float, float]:
    """(MiB that came to be resident at the most, seconds) of a call."""
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before, began = _status("VmRSS"), time.perf_counter()
    run()
    seconds = time.perf_counter() - began
    return (_status("VmHWM") - before) / MIB, seconds


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")
