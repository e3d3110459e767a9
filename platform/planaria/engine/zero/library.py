"""The library DeepSpeed: imported where a job uses it and nowhere else, and kept from what it does unasked.

DeepSpeed keeps process-wide state (groups, stacks of modules); a process here plays a rank in one generation after
another, so that state must be taken down with each generation.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import warnings
import weakref
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

PARTS = (
    "deepspeed.runtime.engine",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
)
"""Modules that a step uses; DeepSpeed imports some of them only then."""


_living: list[weakref.ref[Any]] = []
"""Engines of the present generation."""


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
    except ImportError as error:
        raise DeepSpeedMissing(
            f"engine.name: deepspeed, but DeepSpeed cannot be imported ({error}); install the versions of "
            "constraints.txt on every node, or set engine.name: native"
        ) from error
    try:
        _check()
    except (AttributeError, TypeError, ValueError) as error:
        raise DeepSpeedMissing(
            f"DeepSpeed {deepspeed.__version__} is not as the engine knows it ({error}); "
            "install that of constraints.txt"
        ) from error
    # On CPUs DeepSpeed would compile an all-reduce over shared memory, which needs a compiler on every node and can
    # not be interrupted: a rank that waits there for a dead peer waits for ever.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # It warns of every optimizer but its own, in every generation, and calls collectives by names that torch has left.
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        warnings.filterwarnings("ignore", f"`torch.distributed.{name}` is deprecated", FutureWarning)
    return deepspeed


def join(device: torch.device) -> Any:
    """The module ``deepspeed``, ready to work in the process groups that were just formed."""
    deepspeed = load(device.type)
    # DeepSpeed would form a copy of the world's group now. Its connections would not be among those that an abort
    # cuts, and forming it would be one more thing that can hang.
    groups: Any = importlib.import_module("deepspeed.utils.groups")
    groups._WORLD_GROUP = dist.group.WORLD
    # ZeRO-3 numbers parameters and modules through the life of a process, and compares the numbers of all ranks: those
    # of a worker that has just joined would not be those of one that has played in generations before.
    init = deepspeed.zero.Init
    init.param_id = init.num_persisted_parameters = init.num_persisted_elements = 0
    _module_counter()[0] = 0
    return deepspeed


def _check() -> None:
    """Raise where what is relied on beside DeepSpeed's interface is missing."""
    groups: Any = importlib.import_module("deepspeed.utils.groups")
    for name in ("_WORLD_GROUP", "_release_process_group_references"):
        getattr(groups, name)
    _module_counter()


def _module_counter() -> list[int]:
    """Where ZeRO-3 keeps the number of the next module: the default value of an argument."""
    offload: Any = importlib.import_module("deepspeed.runtime.zero.parameter_offload")
    (counter,) = offload.DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
    return counter


def initialise(deepspeed: Any, model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Any:
    """DeepSpeed's engine; :func:`release` takes it down."""
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    _living.append(weakref.ref(engine))
    return engine


def release() -> None:
    """Make the engines of this process collectable: hooks that autograd holds refer to them, where Python's garbage
    collector does not see it. Does nothing where DeepSpeed was not used."""
    while _living:
        engine = _living.pop()()
        if engine is not None:
            with contextlib.suppress(Exception):  # one that was interrupted may be in any state
                engine.destroy()
    _forget_coordinators()
    if (offload := sys.modules.get("deepspeed.runtime.zero.parameter_offload")) is not None:
        offload.FWD_MODULE_STACK.clear()  # where an interrupted forward pass has left its modules


def _forget_coordinators() -> None:
    """Empty the caches of ZeRO-3's methods, whose keys hold the coordinator of every model that there was."""
    if (module := sys.modules.get("deepspeed.runtime.zero.partitioned_param_coordinator")) is None:
        return
    for method in vars(module.PartitionedParameterCoordinator).values():
        # The cache is below a decorator that does not tell what it wraps.
        for cell in getattr(method, "__closure__", None) or ():
            if hasattr(cell.cell_contents, "cache_clear"):
                cell.cell_contents.cache_clear()


def destroy_process_group() -> None:
    """Destroy all process groups of this process, and what DeepSpeed remembers of them."""
    try:
        dist.destroy_process_group()
    finally:
        if (groups := sys.modules.get("deepspeed.utils.groups")) is not None:
            groups._release_process_group_references(None)
