"""The controller's care for the state: where the newest is, checkpoints on their way, memory that can be let go."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from planaria.config import JobConfig, vault_root
from planaria.control.drains import Drains
from planaria.control.events import Saved
from planaria.control.failure import JobFailed
from planaria.control.generation import Generation
from planaria.control.resume import Resume
from planaria.control.status import Status
from planaria.data.identity import DataIdentity
from planaria.data.skips import Windows
from planaria.memory.client import announce_ring, forget, newest_in_memory
from planaria.memory.recall import MemorySource
from planaria.memory.wire import KeeperAddress
from planaria.observe.record import RunRecord
from planaria.state.errors import CheckpointError
from planaria.state.vault import Vault

FIRST_SAVE_S = 2.0
"""What a checkpoint is expected to take as long as none was made."""
Message = dict[str, Any]
Source = MemorySource | int | None
"""Where a state is: in memory, in the checkpoint of a step, or nowhere yet: the initial weights."""


class Custody:
    """Called from the controller's thread only; what takes long happens in threads, and comes back as events.

    Args:
        job, run_dir: whose state it is.
        record, view: where to tell of it.
        keepers: addresses of the keepers that are ready, by node.
        tell: takes a :class:`Saved` when an attempt to save is over; called from another thread.
        data: the samples that the job reads, where that is known.
    """

    def __init__(
        self,
        job: JobConfig,
        run_dir: str,
        record: RunRecord,
        view: Status,
        keepers: Callable[[], dict[str, KeeperAddress]],
        tell: Callable[[Saved], None],
        data: DataIdentity | None = None,
    ) -> None:
        self._data = data
        self._job, self._record, self._view, self._keepers = job, record, view, keepers
        root = vault_root(job, run_dir)
        self._vault = Vault(
            root,
            keep_last=job.checkpoint.keep_last,
            keep_every=job.checkpoint.keep_every,
            # What is committed was written from memory by processes that still live; reading all of it back, over
            # the network, for every checkpoint would cost more than it could find.
            verify_before_removal=False,
            on_problem=lambda problem: record.event("vault", problem),
        )
        self._resume = Resume(self._vault, job, root, record.event, data)
        self._drains = Drains(self._vault, tell)
        self.save_s = FIRST_SAVE_S
        """Seconds from a snapshot to its durable checkpoint, the last time."""

    def claim(self, holder: str) -> None:
        """From now on an earlier controller of this run that still lives, cut off somewhere, commits no more."""
        self._vault.claim(holder)

    def returned(self, generation: Generation | None) -> None:
        """The controller has come back: what is durable need not be committed when it is told of again."""
        for info in self._vault.list("shallow"):
            if info.intact:
                self._view.checkpoint_step = max(info.step, self._view.checkpoint_step or 0)
                if generation is not None:
                    self._drains.known(generation.number, info.step)

    def newest(self) -> Source:
        """The newest state that memory covers completely, or the step of a newer checkpoint that is intact.

        Raises:
            JobFailed: there are checkpoints, but none can be used.
        """
        saved = self._view.checkpoint_step
        source = newest_in_memory(self._keepers().values())
        if source is not None and (saved is None or saved <= source.step):
            return source
        return self._resume.step(saved)

    @property
    def windows(self) -> Windows:
        """Batches that training leaves out."""
        return self._resume.windows

    def leave_out(self, windows: Windows) -> None:
        """Training leaves these batches out from now on, and in states from before."""
        self._resume.windows = windows

    def states(self) -> Iterator[int]:
        """Steps done in the states that training could go back to; the vault is asked only when somebody looks."""
        yield 0
        yield from (info.step for info in self._vault.list("shallow") if info.intact)

    def rewind(self, step: int, generation: int) -> None:
        """Give up everything that was reached after ``step``, up to the end of ``generation``."""
        forget(list(self._keepers().values()), generation + 1)
        self._resume.give_up_beyond(step)
        self._view.checkpoint_step = step or None

    def damaged(self, problem: str) -> None:
        """The checkpoint that was offered last cannot be read."""
        self._resume.damaged(problem)

    def begun(self, generation: Generation, source: Source) -> None:
        """Let go of what neither this generation nor a fault in its first step can need."""
        kept = (source.generation, source.step) if isinstance(source, MemorySource) else (None, None)
        _in_background(forget, list(self._keepers().values()), generation.number, *kept)

    def announce_ring(self) -> None:
        """Tell the keepers of each other."""
        _in_background(announce_ring, list(self._keepers().values()))

    def worker_said(self, generation: Generation, message: Message) -> None:
        """Take in what a worker of the present generation says of its state."""
        if message["t"] == "draining":
            job = self._job.model_dump(mode="json")
            meta = {
                "layout": str(generation.plan.layout),
                "job": job,
                "skips": [list(window) for window in self._resume.windows],
            }
            if self._data is not None:
                meta["data"] = self._data.as_tree()
            self._drains.begin(generation.number, message["step"], generation.token, generation.nodes, meta)
        elif message["t"] == "step" and message["complete"] is not None and not generation.covered:
            generation.covered = True
            _in_background(forget, list(self._keepers().values()), generation.number)

    def keeper_said(self, node: str, message: Message) -> None:
        """Take in what the keeper of ``node`` says."""
        match message["t"]:
            case "drained" | "drain_failed":
                self._drains.take(message)
            case "memory":
                self._view.memory[node] = message["used"]
            case "energy":
                self._view.energy[node] = message["joules"]
            case kind:
                fields = {key: value for key, value in message.items() if key != "t"}
                self._record.event(kind, _trouble(message), **fields)

    def keeper_lost(self, node: str) -> None:
        """The memory of a node is gone."""
        self._view.memory.pop(node, None)
        self._view.energy.pop(node, None)
        self._drains.lost(node)
        self.announce_ring()

    def saved(self, event: Saved, generations: list[Generation]) -> None:
        """An attempt to save is over.

        Raises:
            JobFailed: another controller has taken the run over.
        """
        self._drains.over(event)
        fields = {"step": event.step, "gen": event.generation, "took_s": event.seconds}
        if event.problem is None:
            self.save_s = event.seconds
            self._view.checkpoint_step = max(event.step, self._view.checkpoint_step or 0)
            self._record.event(
                "checkpoint", f"checkpoint of step {event.step} is durable", nbytes=event.nbytes, **fields
            )
        elif event.fenced:
            raise JobFailed(event.problem)
        else:
            generations[event.generation - 1].problems[event.step] = event.problem
            text = f"checkpoint failed: {event.problem}"
            self._record.event("checkpoint_failed", text, problem=event.problem, **fields)

    def needs(self, node: str) -> bool:
        """Whether a checkpoint is still being written from the memory of ``node``."""
        return self._drains.waits_for(node)

    def pending(self, generation: Generation) -> bool:
        """Whether a checkpoint of the generation is on its way."""
        return self._drains.pending(generation.number)

    def durable(self) -> tuple[int | None, str | None]:
        """Step and path of the newest intact checkpoint."""
        with contextlib.suppress(CheckpointError):
            newest = next((info for info in self._vault.list("shallow") if info.intact), None)
            self._view.checkpoint_step = newest.step if newest else None
            return self._view.checkpoint_step, newest.path if newest else None
        return self._view.checkpoint_step, None


def where(source: Source) -> str:
    """Where a generation starts, for a person."""
    if source is None:
        return "the initial weights"
    if isinstance(source, MemorySource):
        return f"step {source.step} in memory"
    return f"the checkpoint of step {source}"


def step_of(source: Source) -> int:
    """Steps done in a state."""
    return source.step if isinstance(source, MemorySource) else source or 0


def _in_background(function: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=function, args=args, daemon=True).start()


def _trouble(message: Mapping[str, Any]) -> str:
    """What a keeper complains of, for a person."""
    match message["t"]:
        case "unreplicated":
            return f"no copy of {message['owner']}'s state on node {message['partner'][:8]}: {message['problem']}"
        case "courier_failed":
            return f"the state of {message['owner']} is not copied to other nodes any more: {message['problem']}"
        case "memory_short":
            return f"{message['owner']}: {message['problem']}"
        case "memory_damaged":
            return f"{message['slice']} of {message['owner']} in memory does not match its checksum; it is not used"
    return str(message)
