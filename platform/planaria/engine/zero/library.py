"""The library DeepSpeed: imported where a job uses it and nowhere else, and kept from what it does unasked.

DeepSpeed keeps process-wide state (groups, stacks of modules); a process here plays a rank in one generation after
another, so that state must be taken down with each generation.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

PARTS = (
    "deepspeed.runtime.engine",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
)
"""Modules that a step uses; DeepSpeed imports some of them only then."""


class DeepSpeedMissing(RuntimeError):
    """DeepSpeed cannot be imported, or is another version than the engine can use."""


@cache
def load(device: str) -> Any:
    """The module ``deepspeed``, set up for ``device`` ("cpu" or "cuda"); heavy at the first call.

    Raises:
        DeepSpeedMissing: it is not installed, does not import, or lacks what the engine relies on.
    """
    # Asked by DeepSpeed to choose its accelerator: without it a CPU job on a machine with a GPU would take that.
    os.environ.setdefault("DS_ACCELERATOR", device)
    # A worker sees one device, the first. DeepSpeed refuses to start without this name.
    os.environ.setdefault("LOCAL_RANK", "0")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            deepspeed = importlib.import_module("deepspeed")
            for part in PARTS:
                importlib.import_module(part)
            groups = importlib.import_module("deepspeed.utils.groups")
    except ImportError as error:
        raise DeepSpeedMissing(
            f"engine.name: deepspeed, but DeepSpeed cannot be imported ({error}); install the versions of "
            "constraints.txt on every node, or set engine.name: native"
        ) from error
    if not hasattr(groups, "_WORLD_GROUP") or not hasattr(groups, "_release_process_group_references"):
        raise DeepSpeedMissing(f"DeepSpeed {deepspeed.__version__} is not supported; install 0.19.8 (constraints.txt)")
    # On CPUs DeepSpeed would compile an all-reduce over shared memory, which needs a compiler on every node and can
    # not be interrupted: a rank that waits there for a dead peer waits for ever.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def join(device: torch.device) -> Any:
    """The module ``deepspeed``, ready to work in the process groups that were just formed."""
    deepspeed = load(device.type)
    # DeepSpeed would form a copy of the world's group now. Its connections would not be among those that an abort
    # cuts, and forming it would be one more thing that can hang.
    groups: Any = importlib.import_module("deepspeed.utils.groups")
    groups._WORLD_GROUP = dist.group.WORLD
    return deepspeed


def destroy_process_group() -> None:
    """Destroy all process groups of this process, with what DeepSpeed remembers of them if it was used."""
    comm = sys.modules.get("deepspeed.comm.comm")
    used = comm is not None and getattr(comm, "cdb", None) is not None
    try:
        dist.destroy_process_group()
    finally:
        if used:
            groups = sys.modules["deepspeed.utils.groups"]
            groups._release_process_group_references(None)
            # An interrupted forward pass leaves its modules there, and these hold the model.
            sys.modules["deepspeed.runtime.zero.parameter_offload"].FWD_MODULE_STACK.clear()
