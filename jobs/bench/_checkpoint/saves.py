"""Rank side: one checkpoint of the state by one contender. All ranks call a function together."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from _checkpoint.pool import Rank
from _checkpoint.work import Global, Work, values
from planaria.layout import Layout
from planaria.memory.buffers import HEADER_BYTES, Seal, SharedBuffer, break_seal, write_seal
from planaria.memory.host_copy import HostCopy
from planaria.state.boxes import Box
from planaria.state.dedupe import is_writer
from planaria.state.shard import bytes_of
from planaria.state.vault import Vault
from planaria.state.writer import Piece

SAVED = Layout(dp_shard=4)
Stall = dict[str, float]
"""``stall``: seconds that the training thread stood still; ``durable``: until the checkpoint was, if it ever is."""


def hold(me: Rank, work: Work) -> None:
    """Build this rank's part of the state, as FSDP2 holds it."""
    me.kept["work"] = work
    me.kept["held"] = [(tensor, box, values(tensor, box)) for tensor, box, _ in work.held(SAVED, me.rank)]


def release(me: Rank) -> None:
    """Let go of everything."""
    me.kept.clear()


def measure(me: Rank, contender: str, folder: str, number: int) -> Stall:
    """One checkpoint in a folder of its own, which is removed afterwards; the disk is idle before and after."""
    place = f"{folder}/{number}"
    if me.rank == 0 and "://" not in place:
        os.makedirs(place)
    dist.barrier()
    found = CONTENDERS[contender](me, place, number)
    dist.barrier()
    if me.rank == 0:
        shutil.rmtree(place, ignore_errors=True)
        os.sync()
    dist.barrier()
    return found


# -- what all are measured against -------------------------------------------------------------------


def memcpy(me: Rank, folder: str, number: int) -> Stall:
    """A copy into memory that was touched before."""
    tensors = [value for _, _, value in me.kept["held"]]
    targets = _once(me, "memcpy", lambda: [torch.ones_like(value) for value in tensors])
    began = time.perf_counter()
    torch._foreach_copy_(targets, tensors)
    return {"stall": time.perf_counter() - began}


def disk(me: Rank, folder: str, number: int) -> Stall:
    """One file per rank: large writes, then fsync."""
    path = Path(folder) / str(me.rank)
    buffers = [bytes_of(value) for _, _, value in me.kept["held"]]
    began = time.perf_counter()
    with open(path, "xb", buffering=0) as file:
        for buffer in buffers:
            rest = buffer
            while rest:
                rest = rest[os.write(file.fileno(), rest) :]
        os.fsync(file.fileno())
    took = time.perf_counter() - began
    return {"stall": took, "durable": took}


# -- Planaria ----------------------------------------------------------------------------------------


def measure_memory(me: Rank, folder: str, number: int) -> Stall:
    """The snapshot after a step: a copy into shared memory that the node's keeper holds, sealed at its end."""
    tensors = [value for _, _, value in me.kept["held"]]

    def allocate() -> tuple[SharedBuffer, list[Tensor], HostCopy]:
        buffer = SharedBuffer("/dev/shm", HEADER_BYTES + sum(value.nbytes for value in tensors))
        views, at = [], HEADER_BYTES
        for value in tensors:
            flat = torch.frombuffer(buffer.map, dtype=value.dtype, count=value.numel(), offset=at)
            views.append(flat.view(value.shape).zero_())
            at += value.nbytes
        return buffer, views, HostCopy(torch.device("cpu"))

    buffer, views, copy = _once(me, "memory", allocate)
    began = time.perf_counter()
    break_seal(buffer.map)
    copy(views, tensors, lambda: write_seal(buffer.map, Seal(1, number)))
    return {"stall": time.perf_counter() - began}


def vault(me: Rank, root: str, number: int) -> Stall:
    """The keepers' part: shards with checksums, then one commit. Training goes on meanwhile."""
    store = Vault(root)
    pieces = [Piece(tensor.name, tensor.shape, box, value) for tensor, box, value in me.kept["held"]]
    began = time.perf_counter()
    _write(me, store, number, pieces)
    return {"durable": time.perf_counter() - began}


def _write(me: Rank, store: Vault, number: int, pieces: list[Piece]) -> None:
    writer = store.writer(number, "bench")
    gathered: list[Any] = [None] * me.world
    dist.all_gather_object(gathered, writer.write_shard(me.rank, pieces))
    if me.rank == 0:
        writer.commit([item for slices in gathered for item in slices], {})
    dist.barrier()


# -- torch.distributed.checkpoint --------------------------------------------------------------------


def dcp_save(me: Rank, folder: str, number: int) -> Stall:
    """``save``: the training thread writes."""
    state = _once(me, "dtensors", lambda: sharded(me.kept["held"], SAVED))
    began = time.perf_counter()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), planner=_planner())
    took = time.perf_counter() - began
    return {"stall": took, "durable": took}


def dcp_thread(me: Rank, folder: str, number: int) -> Stall:
    """``async_save`` with a thread."""
    return _dcp_async(me, folder, "thread", AsyncCheckpointerType.THREAD)


def dcp_process(me: Rank, folder: str, number: int) -> Stall:
    """``async_save`` with a process, which reads the staging memory in place since it is shared."""
    return _dcp_async(me, folder, "process", AsyncCheckpointerType.PROCESS)


def _dcp_async(me: Rank, folder: str, kind: str, executor: AsyncCheckpointerType) -> Stall:
    state = _once(me, "dtensors", lambda: sharded(me.kept["held"], SAVED))
    # Staging memory that is kept from one checkpoint to the next; the other options want an accelerator.
    stager = _once(me, f"stager {kind}", lambda: DefaultStager(StagingOptions(False, True, False, False)))
    # A group of its own: the thread's collectives must not mix with those of the training thread.
    group = _once(me, f"group {kind}", dist.new_group)
    began = time.perf_counter()
    future = dcp.async_save(
        state,
        storage_writer=dcp.FileSystemWriter(folder),
        planner=_planner(),
        process_group=group,
        async_checkpointer_type=executor,
        async_stager=stager,
    )
    stall = time.perf_counter() - began
    future.result()  # type: ignore[union-attr]
    return {"stall": stall, "durable": time.perf_counter() - began}


def _planner() -> dcp.DefaultSavePlanner:
    return dcp.DefaultSavePlanner(enable_plan_caching=True)


def sharded(held: list[tuple[Global, Box, Tensor]], layout: Layout) -> dict[str, DTensor]:
    """The state as DTensors, as FSDP2 (or, in a pipeline of tensor-parallel stages, TP) makes them."""
    mesh: DeviceMesh = init_device_mesh("cpu", (layout.pp, layout.dp_shard * layout.tp), mesh_dim_names=("pp", "in"))[
        "in"
    ]
    state: dict[str, DTensor] = {}
    for tensor, _, value in held:
        dim = 0 if layout.tp == 1 else tensor.tp_dim
        placement: Placement = Replicate() if dim is None else Shard(dim)
        stride = torch.empty(tensor.shape, device="meta").stride()
        state[tensor.name] = DTensor.from_local(
            value, mesh, [placement], run_check=False, shape=torch.Size(tensor.shape), stride=stride
        )
    return state


# -- sources for loading -----------------------------------------------------------------------------


def save_sources(me: Rank, work: Work, folder: str, layout: Layout) -> None:
    """The state as ``layout`` holds it, saved by Planaria and by DCP."""
    coords = layout.coords(me.rank)
    found = [(tensor, box, axes, values(tensor, box)) for tensor, box, axes in work.held(layout, me.rank)]
    pieces = [Piece(t.name, t.shape, box, value) for t, box, axes, value in found if is_writer(coords, axes)]
    _write(me, Vault(f"{folder}/{layout}/planaria"), 1, pieces)
    dcp.save(sharded([(t, box, value) for t, box, _, value in found], layout), checkpoint_id=f"{folder}/{layout}/dcp")
    dist.barrier()


def _once(me: Rank, name: str, make: Callable[[], Any]) -> Any:
    if name not in me.kept:
        me.kept[name] = make()
    return me.kept[name]


CONTENDERS: dict[str, Callable[[Rank, str, int], Stall]] = {
    "memcpy": memcpy,
    "disk": disk,
    "planaria memory": measure_memory,
    "planaria vault": vault,
    "planaria vault on s3": vault,
    "dcp save": dcp_save,
    "dcp async thread": dcp_thread,
    "dcp async process": dcp_process,
}
