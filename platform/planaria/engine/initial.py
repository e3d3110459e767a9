"""State before the first step: the same weights on every layout, without the whole model in memory.

A model on the meta device is initialised unit by unit on the CPU, each under a seed made from
(job seed, unit name). A rank materialises one unit at a time and keeps its own boxes, so the result
does not depend on the layout and the peak is the largest unit.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from planaria.config import JobConfig
from planaria.engine.tensor_parallel import find_module
from planaria.recipe import MetaRecipe, PretrainedRecipe, Recipe, StateReader
from planaria.state.boxes import Box

DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp16": torch.float32, "fp64": torch.float64}
"""Dtype of the master weights by precision."""


def first_state(recipe: Recipe, job: JobConfig) -> StateReader:
    """The state before the first step: the recipe's own weights if it has some, else fresh ones."""
    given = recipe.initial_state(job) if isinstance(recipe, PretrainedRecipe) else None
    return InitialState(recipe, job) if given is None else given


def build(recipe: Recipe, job: JobConfig) -> nn.Module:
    """The unsharded model: on the meta device for a :class:`MetaRecipe`, else seeded on the CPU."""
    dtype = DTYPES[job.train.precision]
    if isinstance(recipe, MetaRecipe):
        with torch.device("meta"):
            return recipe.build_model().to(dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)
        return recipe.build_model().to(dtype)


class InitialState:
    """Freshly initialised weights, read by box."""

    step = 0

    def __init__(self, recipe: Recipe, job: JobConfig) -> None:
        self._recipe, self._job = recipe, job
        self._model = build(recipe, job)
        self._units = sorted(recipe.sharding(self._model).units, key=len, reverse=True)
        self._root: dict[str, Tensor] | None = None
        self._unit: tuple[str, dict[str, Tensor]] = ("", {})

    def read(self, tensor: str, box: Box) -> Tensor:
        """Part ``box`` of ``model/NAME``; raises KeyError for anything else."""
        kind, _, name = tensor.partition("/")
        if kind != "model":
            raise KeyError(f"the initial state holds no {tensor}")
        whole = self._whole(name)
        return whole[box.relative_to(Box.whole(whole.shape))]

    def _whole(self, name: str) -> Tensor:
        if not isinstance(self._recipe, MetaRecipe):
            return self._model.get_parameter(name).detach()
        unit = next((unit for unit in self._units if name.startswith(unit + ".")), None)
        if unit is None:
            if self._root is None:
                self._root = _parameters(materialise(self._recipe, self._job, self._model, "", self._units))
            return self._root[name]
        if self._unit[0] != unit:
            module = materialise(self._recipe, self._job, self._model, unit, ())
            self._unit = (unit, {f"{unit}.{key}": value for key, value in _parameters(module).items()})
        return self._unit[1][name]


def materialise(recipe: MetaRecipe, job: JobConfig, model: nn.Module, name: str, without: Sequence[str]) -> nn.Module:
    """An initialised CPU copy of ``model``'s submodule ``name``, its submodules ``without`` left out.

    Raises:
        RuntimeError: ``init_module`` left something uninitialised, which would train as garbage.
    """
    removed = {unit: model.get_submodule(unit) for unit in without}
    for unit in removed:
        _replace(model, unit, nn.Identity())
    try:
        module = copy.deepcopy(model.get_submodule(name))
    finally:
        for unit, original in removed.items():
            _replace(model, unit, original)
    ties = tied_names(module)
    module.to_empty(device="cpu")
    retie(module, ties)
    floats = {
        key: value for key, value in (*module.named_parameters(), *module.named_buffers()) if value.is_floating_point()
    }
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for value in floats.values():
            value.fill_(torch.nan)
        torch.manual_seed(seed_of(job.seed, name))
        recipe.init_module(model, name, module)
        left = [f"{name}.{key}".lstrip(".") for key, value in floats.items() if value.isnan().any()]
    if left:
        raise RuntimeError(f"{type(recipe).__name__}.init_module does not initialise {', '.join(left)}")
    return module


def restore_buffers(recipe: MetaRecipe, job: JobConfig, model: nn.Module) -> None:
    """Fill the buffers of a model that came from the meta device (rotary frequencies, position ids)."""
    meta = build(recipe, job)  # type: ignore[arg-type]
    units = recipe.sharding(meta).units  # type: ignore[attr-defined]
    for name, module in meta.named_modules():
        own = [key for key, buffer in module.named_buffers(recurse=False) if buffer is not None]
        target = find_module(model, name)
        if not own or target is None:  # the latter in a pipeline: another stage has it
            continue
        below = [unit for unit in units if unit.startswith(f"{name}." if name else "")]
        filled = materialise(recipe, job, meta, name, below)
        for key in own:
            getattr(target, key).copy_(getattr(filled, key))


def seed_of(seed: int, name: str) -> int:
    """A 63-bit seed for ``name``, the same on every machine."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def tied_names(model: nn.Module) -> list[list[str]]:
    """Groups of parameter names that are one tensor."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def retie(model: nn.Module, ties: list[list[str]]) -> None:
    """Make each group of names one tensor again: materialising a module separates them."""
    for first, *others in ties:
        parameter = model.get_parameter(first)
        for other in others:
            owner, _, leaf = other.rpartition(".")
            model.get_submodule(owner).register_parameter(leaf, parameter)


def _parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, module)
