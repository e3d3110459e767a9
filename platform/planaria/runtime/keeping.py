"""What the training loop does to keep its state: a snapshot after each step, now and then a durable one."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from planaria.config import JobConfig
from planaria.engine.protocol import Engine
from planaria.layout import Layout
from planaria.memory.placement import duty
from planaria.memory.snapshots import Snapshots
from planaria.memory.table import Entry, Table
from planaria.state.dtypes import code_of
from planaria.state.errors import CheckpointError
from planaria.state.holdings import holders

WAIT_S = 600.0
"""Longest wait for the memory that a snapshot needs, or for the storage to take the checkpoint before."""

Report = Callable[[dict[str, Any]], None]


def describe(engine: Engine, rank: int, nodes: Sequence[str]) -> Table:
    """What ``rank`` keeps in its node's memory: each slice once per node.

    Args:
        engine: the engine of this rank.
        rank: own rank.
        nodes: node of every rank.
    """
    layout: Layout = engine.layout
    entries = []
    known: dict[Collection[str], list[int]] = {}
    for held in engine.state():
        if held.axes not in known:
            known[held.axes] = holders(layout, rank, held.axes)
        ranks = known[held.axes]
        keeps, first = duty(ranks, rank, nodes)
        empty = held.box.empty and 0 not in held.global_shape
        if keeps and not empty:
            at = tuple(sorted({nodes[other] for other in ranks}))
            nbytes = held.box.numel * held.value.element_size()
            code = code_of(held.value.dtype)
            entries.append(Entry(held.tensor, held.global_shape, code, held.box, 0, nbytes, first, first, at))
    return Table.of(entries, engine.expected())


def true_everywhere(here: bool) -> bool:
    """Whether ``here`` is true on all ranks; collective."""
    missing = torch.tensor(int(not here))
    torch.distributed.all_reduce(missing)
    return not missing.item()


class Keeping:
    """Snapshots and checkpoints of one rank in one generation.

    Args:
        snapshots: the memory tier.
        table: what a snapshot holds, see :func:`describe`.
        engine: whose state it is.
        job: says how often.
        token: names this generation's checkpoint attempts.
        durable: step that durable storage holds already.
        report: tells the controller.
        interrupted: whether the generation was aborted.
        everywhere: tells whether something holds on all ranks; collective.
        at: told where this rank is (:class:`planaria.runtime.progress.Progress`).
    """

    def __init__(
        self,
        snapshots: Snapshots,
        table: Table,
        engine: Engine,
        job: JobConfig,
        token: str,
        durable: int | None,
        report: Report,
        interrupted: Callable[[], bool],
        everywhere: Callable[[bool], bool] = true_everywhere,
        at: Callable[[int, str], None] = lambda step, phase: None,
    ) -> None:
        self._snapshots, self._engine, self._job = snapshots, engine, job
        self._token, self._durable, self._report, self._interrupted = token, durable, report, interrupted
        self._everywhere, self._at = everywhere, at
        # A rank may hold several boxes of one tensor.
        places = {(held.tensor, held.box): at for at, held in enumerate(engine.state())}
        self._order = [places[entry.tensor, entry.box] for entry in table.entries]

    @property
    def complete(self) -> int | None:
        """Newest step of this generation that is known to be complete in memory, on all ranks."""
        return self._snapshots.complete

    def poll(self) -> tuple[int, ...]:
        """This rank's votes: 1 if no snapshot can be taken, 1 if the last one is not yet where it should be, 1 if the
        last checkpoint is still being written."""
        ready = self._snapshots.ready()
        return int(not ready), int(not (ready or self._snapshots.settled)), int(self._snapshots.draining)

    def after_step(self, votes: tuple[int, ...]) -> float:
        """Keep the state of the step that is done, as far as it is due; returns the seconds that it took.

        The decisions follow from the sums of all votes, so they are the same on every rank.
        """
        began = time.monotonic()
        unready, unsettled, draining = votes
        if not unsettled:
            self._snapshots.note_complete()
        if not self._engine.joined:
            return time.monotonic() - began
        done, job = self._engine.step_done, self._job
        if done % job.checkpoint.every == 0 and done < job.train.steps:
            if draining:
                self._report({"t": "checkpoint_skipped", "step": done})
            else:
                self.checkpoint()
                return time.monotonic() - began
        if job.memory.every and done % job.memory.every == 0 and not unready:
            self._take()
        return time.monotonic() - began

    def snapshot(self) -> None:
        """Have the present state in memory, whatever it takes; the same call is made on every rank.

        Raises:
            CheckpointError: there is no memory for it.
        """
        if self._snapshots.newest == self._engine.step_done:
            return
        # On all ranks, and so that the one before is complete while this one is made.
        self._await(self._snapshots.wait_ready, "the memory for it did not become free")
        self._snapshots.note_complete()
        self._take()

    def checkpoint(self) -> None:
        """Have the present state written to durable storage while training goes on; the controller commits it."""
        step = self._engine.step_done
        if step == self._durable:
            return
        began = time.monotonic()
        self._at(step, "checkpoint")
        self._await(self._snapshots.wait_drained, "the one before is still being written")
        self.snapshot()
        # Told first, so that the controller knows of it when it hears that this rank has ended.
        self._report({"t": "draining", "step": step, "stall_s": time.monotonic() - began})
        self._snapshots.drain(step, self._token, torch.distributed.get_rank())
        self._durable = step

    def close(self) -> None:
        """Let go of the memory; the keeper holds it."""
        self._snapshots.close()

    def _take(self) -> None:
        held = [item.value for item in self._engine.state()]
        self._snapshots.take(self._engine.step_done, [held[at] for at in self._order])

    def _await(self, condition: Callable[[float, Callable[[], bool]], bool], trouble: str) -> None:
        """Wait until the condition holds on all ranks."""
        step, deadline = self._engine.step_done, time.monotonic() + WAIT_S
        while not self._everywhere(condition(1.0, self._interrupted)):
            if self._interrupted():
                raise RuntimeError("the generation was aborted while waiting to keep its state")
            if time.monotonic() > deadline:
                raise CheckpointError(f"the state of step {step} could not be kept within {WAIT_S:.0f} s: {trouble}")
            self._at(step, "checkpoint")  # again: it waits, and is not stuck
