"""One cell of the table: a family on a variant, beside the same family in one process."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from planaria.config import ConfigError, JobConfig
from planaria.parity.measure import Held, assemble, held, relative_errors
from planaria.parity.ranks import RankPool
from planaria.parity.reference import Reference
from planaria.parity.steps import Shaken, engine_of, small_job, step
from planaria.parity.table import OPTIMIZERS, Family, Variant
from planaria.runtime.groups import Groups

LIMIT = 1e-9
STEPS = 3
REFUSALS = ("LayoutError", "ShardingError", "ConfigError")
"""Errors by which an engine says that it does not run something."""


@dataclass
class Cell:
    """What was found.

    Attributes:
        family: name of the row.
        variant: name of the column.
        errors: largest relative error over all tensors, by what was compared: ``gradients``, ``sgd``, ``adamw``.
        worst: the tensor of each.
        refused: why an engine does not run this; empty if it does.
        broken: what went wrong where nothing could be compared; empty if it could.
        seconds: what the cell took.
    """

    family: str
    variant: str
    errors: dict[str, float] = field(default_factory=dict)
    worst: dict[str, str] = field(default_factory=dict)
    refused: str = ""
    broken: str = ""
    seconds: float = 0.0

    @property
    def error(self) -> float:
        """Largest of all errors."""
        return max(self.errors.values(), default=0.0)

    @property
    def passed(self) -> bool:
        """Whether everything was compared and is equal to rounding; a refusal neither passes nor fails."""
        return not self.refused and not self.broken and self.error < LIMIT

    @property
    def failed(self) -> bool:
        """Whether something is wrong."""
        return not self.passed and not self.refused


@dataclass(frozen=True)
class Oracle:
    """What one process computes."""

    gradients: dict[str, Tensor]
    parameters: dict[str, dict[str, Tensor]]
    """After :data:`STEPS` steps, by optimizer."""


class Oracles:
    """Reference runs, each made once: variants that differ in layout alone share one."""

    def __init__(self) -> None:
        self._made: dict[str, Oracle] = {}

    def of(self, family: Family, job: JobConfig, optimizers: tuple[str, ...]) -> Oracle:
        """The oracle of ``family`` for the data of ``job``."""
        train = job.train.model_copy(update={"micro_batch": 1})
        key = f"{family.name} {job.model} {job.data} {job.optim} {train} {optimizers}"
        if key not in self._made:
            self._made[key] = _oracle(family, job, optimizers)
        return self._made[key]


def _oracle(family: Family, job: JobConfig, optimizers: tuple[str, ...]) -> Oracle:
    gradients: dict[str, Tensor] = {}
    parameters: dict[str, dict[str, Tensor]] = {}
    for name in optimizers or ("sgd",):
        one = _with(job, OPTIMIZERS[name])
        recipe = family.recipe(one)
        reference = Reference(recipe, one, Shaken(recipe, one))
        plain = reference.optimizer()
        for number in range(STEPS if optimizers else 1):
            reference.backward()
            if number == 0:
                gradients = reference.gradients()
            plain.step()
            reference.step_done += 1
        parameters[name] = reference.parameters()
    return Oracle(gradients, parameters if optimizers else {})


def _with(job: JobConfig, overrides: Mapping[str, Any]) -> JobConfig:
    """``job`` with other keys of its optimizer."""
    changes = {dotted.removeprefix("optim."): value for dotted, value in overrides.items()}
    return job.model_copy(update={"optim": job.optim.model_copy(update=changes)})


def _train(groups: Groups, family: Family, job: JobConfig, steps: int) -> tuple[Held, Held]:
    """On each rank: its gradients of the first step, and its parameters after all."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # a view of the logits, which nobody changes
    recipe = family.recipe(job)
    engine = engine_of(groups, recipe, job, Shaken(recipe, job))
    gradients: list[Held] = []
    step(engine, on_gradients=lambda: gradients.append(held(engine, gradients=True)))
    for _ in range(steps - 1):
        step(engine)
    return gradients[0], held(engine, gradients=False)


def measure(pool: RankPool, oracles: Oracles, family: Family, variant: Variant) -> Cell:
    """Run one cell; whatever goes wrong in it is in the cell.

    Raises:
        EOFError: a rank died; the pool is of no more use.
    """
    began = time.monotonic()
    cell = Cell(family.name, variant.name)
    try:
        _compare(pool, oracles, family, variant, cell)
    except ConfigError as error:
        cell.refused = str(error)
    except AssertionError as error:
        cell.broken = _last_line(str(error))
    cell.seconds = round(time.monotonic() - began, 2)
    return cell


def _compare(pool: RankPool, oracles: Oracles, family: Family, variant: Variant, cell: Cell) -> None:
    job = small_job({**family.overrides, **variant.overrides})
    oracle = oracles.of(family, job, variant.optimizers)
    for name in variant.optimizers or ("sgd",):
        steps = STEPS if variant.optimizers else 1
        pool.start(variant.layout, _train, family, _with(job, OPTIMIZERS[name]), steps)
        answers = pool.results(list(range(variant.layout.world)))
        if problems := [value for ok, value in answers if not ok]:
            # The ranks that only waited for one that failed say so, too; what it says itself comes first.
            kind, trace = min(problems, key=lambda problem: problem[0] not in REFUSALS)
            said = _last_line(trace)
            if kind in REFUSALS:
                cell.refused = said
            else:
                cell.broken = said
            return
        ranks = [value for _, value in answers]
        if not cell.errors:
            _note(cell, "gradients", assemble(gradients for gradients, _ in ranks), oracle.gradients)
        if variant.optimizers:
            _note(cell, name, assemble(parameters for _, parameters in ranks), oracle.parameters[name])


def _note(cell: Cell, what: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    errors = relative_errors(found, expected)
    cell.worst[what] = max(errors, key=errors.__getitem__)
    cell.errors[what] = errors[cell.worst[what]]


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no message"
