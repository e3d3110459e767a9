"""A worker's end: copies its slices into shared memory after a step, so that they outlive the process.

Who may be overwritten is decided so that at every instant some step is complete: the buffer that holds the newest
snapshot is never touched, nor one that is being drained, and no new snapshot begins before the last one is known to
be complete on all ranks (the ranks agree on that in a reduction that the step makes anyway).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from mmap import mmap

import torch
from torch import Tensor

from planaria.memory.buffers import Seal, break_seal, map_buffer, write_seal
from planaria.memory.control import ControlPage
from planaria.memory.host_copy import HostCopy
from planaria.memory.table import Table
from planaria.memory.views import views
from planaria.memory.wire import KeeperError, KeeperLink

POLL_S = 0.001


@dataclass
class _Buffer:
    memory: mmap
    views: list[Tensor] = field(repr=False)
    step: int | None = None


class Snapshots:
    """Snapshots of one worker in one generation; used by the training thread.

    Args:
        link: connection to the node's keeper.
        generation, owner: names of the snapshots.
        table: what they hold.
        device: where the state is.
        strict: whether to fail where memory is short, instead of making do with a single buffer.

    Raises:
        KeeperError: the keeper refused (memory too small) or is gone.
    """

    def __init__(
        self, link: KeeperLink, generation: int, owner: str, table: Table, device: torch.device, strict: bool
    ) -> None:
        self._link, self._table = link, table
        self._lock = threading.Lock()  # on CUDA the seal is sent by the thread that awaits the copy
        self._name = {"gen": generation, "owner": owner}
        try:
            answer = link.call({"op": "open", "strict": strict, **self._name}, [table.encoded])
        except BaseException:
            link.close()
            raise
        self.lean: bool = answer["lean"]
        self._page = ControlPage(map_buffer(answer["control"], writable=True))
        self._buffers: list[_Buffer] = []
        self._copy = HostCopy(device)
        self._newest: int | None = None
        self.complete: int | None = None
        """Newest step that is known to be complete on all ranks."""

    @property
    def newest(self) -> int | None:
        """Step of the newest snapshot."""
        return self._newest

    @property
    def draining(self) -> bool:
        """Whether a snapshot of this rank is being written to durable storage."""
        return self._page.pinned is not None

    @property
    def settled(self) -> bool:
        """Whether the last snapshot is where it should be."""
        return self._newest is None or self._page.replicated == self._newest

    def ready(self) -> bool:
        """Whether the last snapshot is settled, and there is room for another one.

        Called before the parameters change: a copy that still reads them is waited for.
        """
        self._copy.fence()
        # With a single buffer the only snapshot would be destroyed while it is replaced: only where that must be.
        return not self.lean and self.settled and self._target() is not None

    def note_complete(self) -> None:
        """All ranks were :attr:`settled`: the newest snapshot is complete everywhere."""
        self.complete = self._newest

    def take(self, step: int, tensors: Sequence[Tensor]) -> None:
        """Copy ``tensors``, in the order of the table, as the state of ``step``."""
        target = self._target()
        if target is None:
            raise KeeperError(f"no shared memory is free for the snapshot of step {step}")
        break_seal(target.memory)
        target.step, self._newest = step, step
        complete = self.complete

        def seal() -> None:
            write_seal(target.memory, Seal(self._name["gen"], step))  # type: ignore[arg-type]
            with self._lock:
                self._link.tell({"op": "sealed", "step": step, "complete": complete, **self._name})

        self._copy(target.views, tensors, seal)

    def wait_ready(self, limit_s: float, interrupted: Callable[[], bool]) -> bool:
        """Wait until a snapshot may be taken whatever happens; False if that takes too long."""
        return _wait(lambda: self.settled and self._target() is not None, limit_s, interrupted)

    def wait_drained(self, limit_s: float, interrupted: Callable[[], bool]) -> bool:
        """Wait until no snapshot of this rank is being written to durable storage; False if that takes too long."""
        return _wait(lambda: not self.draining, limit_s, interrupted)

    def drain(self, step: int, token: str, writer: int) -> None:
        """Have the snapshot of ``step`` written to durable storage; training may go on."""
        self._copy.finish()
        at = next(index for index, buffer in enumerate(self._buffers) if buffer.step == step)
        self._page.pinned = at
        with self._lock:
            self._link.tell({"op": "drain", "step": step, "token": token, "writer": writer, **self._name})

    def close(self) -> None:
        """Let go of the memory, which the keeper keeps."""
        with contextlib.suppress(Exception):  # what a copy failed of was raised where it mattered
            self._copy.finish()
        self._copy.release(buffer.memory for buffer in self._buffers)
        self._buffers = []
        self._link.close()

    def _target(self) -> _Buffer | None:
        """A buffer that may be overwritten."""
        self._map_new()
        free = [
            buffer
            for at, buffer in enumerate(self._buffers)
            if at != self._page.pinned and (self.lean or buffer.step is None or buffer.step != self._newest)
        ]
        return min(free, key=lambda buffer: -1 if buffer.step is None else buffer.step, default=None)

    def _map_new(self) -> None:
        if self._page.buffers <= len(self._buffers):
            return
        with self._lock:
            paths = self._link.call({"op": "buffers", **self._name})["paths"]
        for path in paths[len(self._buffers) :]:
            memory = map_buffer(path, writable=True)
            self._copy.register(memory)
            self._buffers.append(_Buffer(memory, views(memory, self._table)))


def _wait(condition: Callable[[], bool], limit_s: float, interrupted: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():
        if interrupted() or time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
