"""Rank side: one process per target rank reads its part of a checkpoint that another layout wrote."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from _checkpoint.pool import Rank
from _checkpoint.saves import sharded
from _checkpoint.work import Work, same
from planaria.layout import Layout
from planaria.state.shard import bytes_of
from planaria.state.vault import Vault

LOADED = Layout(dp_shard=3)


def hold(me: Rank, work: Work) -> int:
    """Memory for this rank's part, touched; gives its size in bytes."""
    me.kept["held"] = [(tensor, box, torch.ones(box.shape)) for tensor, box, _ in work.held(LOADED, me.rank)]
    me.kept["dtensors"] = sharded(me.kept["held"], LOADED)
    return sum(int(value.nbytes) for _, _, value in me.kept["held"])


def measure(me: Rank, contender: str, folder: str, check: bool) -> float:
    """Seconds of one load; with ``check`` every element is compared afterwards."""
    if check:
        for _, _, value in me.kept["held"]:
            value.zero_()
    dist.barrier()
    began = time.perf_counter()
    CONTENDERS[contender](me, folder)
    took = time.perf_counter() - began
    dist.barrier()
    if check and contender != "raw":
        wrong = [f"{t.name}{box}" for t, box, value in me.kept["held"] if not same(value, t, box)]
        if wrong:
            raise AssertionError(f"{len(wrong)} tensors are not what was saved: {wrong[0]}")
    return took


def raw(me: Rank, folder: str) -> None:
    """As many bytes of Planaria's files into the same memory: one read per tensor, from front to back, unchecked."""
    files = sorted(Path(folder).glob("planaria/checkpoints/*/shard-*"))
    sizes = [file.stat().st_size for file in files]
    descriptors = [os.open(file, os.O_RDONLY) for file in files]
    number, at = 0, sum(sizes) * me.rank // me.world
    try:
        for _, _, value in me.kept["held"]:
            rest = bytes_of(value)
            while rest:
                while at >= sizes[number]:
                    at, number = at - sizes[number], (number + 1) % len(files)
                count = os.preadv(descriptors[number], [rest[: sizes[number] - at]], at)
                at, rest = at + count, rest[count:]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def planaria(me: Rank, folder: str) -> None:
    """Open (manifest and headers checked) and read, every block verified."""
    with Vault(f"{folder}/planaria").at(1) as checkpoint:
        checkpoint.read_into((tensor.name, box, value) for tensor, box, value in me.kept["held"])


def dcp_load(me: Rank, folder: str) -> None:
    """``torch.distributed.checkpoint.load`` into DTensors."""
    dcp.load(me.kept["dtensors"], checkpoint_id=f"{folder}/dcp")


CONTENDERS: dict[str, Callable[[Rank, str], None]] = {"raw": raw, "planaria": planaria, "dcp load": dcp_load}
