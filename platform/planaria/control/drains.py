"""Checkpoints on their way from the keepers' memory to durable storage: when all ranks' shards are there, the
commit; when one cannot come, the end of the attempt. Training goes on meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from planaria.control.events import Saved
from planaria.state.errors import CheckpointError, Fenced
from planaria.state.index import Slice
from planaria.state.vault import Vault

Message = dict[str, Any]


@dataclass
class _Drain:
    """One attempt."""

    generation: int
    step: int
    token: str
    nodes: tuple[str, ...]
    """Node of every rank."""
    meta: Mapping[str, Any]
    began: float = field(default_factory=time.monotonic)
    shards: dict[int, list[Any]] = field(default_factory=dict)
    expected: Mapping[str, list[int]] | None = None
    closing: bool = False
    """Whether it is being committed or removed."""

    @property
    def missing(self) -> set[str]:
        """Nodes that have yet to write a shard."""
        return {node for rank, node in enumerate(self.nodes) if rank not in self.shards}


class Drains:
    """All attempts that are under way; called from the controller's thread.

    Args:
        vault: commits.
        tell: takes a :class:`Saved` when an attempt is over; called from another thread.
    """

    def __init__(self, vault: Vault, tell: Callable[[Saved], None]) -> None:
        self._vault, self._tell = vault, tell
        self._open: dict[tuple[int, int], _Drain] = {}
        self._over: set[tuple[int, int]] = set()
        self._early: list[Message] = []
        """Words of keepers on attempts of which no rank has spoken yet: they come on different ways."""

    def begin(self, generation: int, step: int, token: str, nodes: Iterable[str], meta: Mapping[str, Any]) -> None:
        """A rank has said that its shard of ``step`` is to be written."""
        key = (generation, step)
        if key in self._open or key in self._over:
            return
        self._open[key] = _Drain(generation, step, token, tuple(nodes), meta)
        early, self._early = self._early, []
        for message in early:
            if message["gen"] >= generation:  # words on older generations are not waited for any more
                self.take(message)

    def take(self, message: Message) -> None:
        """A keeper has written a shard, or could not."""
        key = (message["gen"], message["step"])
        drain = self._open.get(key)
        if drain is None and key not in self._over:
            self._early.append(message)
        if drain is None or drain.closing:
            return
        if message["t"] == "drain_failed":
            self._close(drain, message["problem"])
            return
        drain.shards[message["writer"]] = message["slices"]
        drain.expected = message["expected"] or drain.expected
        if len(drain.shards) == len(drain.nodes):
            self._close(drain, None)

    def lost(self, node: str) -> None:
        """The keeper of ``node`` is gone, and with it what it has not written yet."""
        for drain in list(self._open.values()):
            if node in drain.missing and not drain.closing:
                self._close(drain, f"node {node[:8]} was lost while it wrote its part")

    def waits_for(self, node: str) -> bool:
        """Whether the keeper of ``node`` has yet to write something."""
        return any(node in drain.missing and not drain.closing for drain in self._open.values())

    def known(self, generation: int, step: int) -> None:
        """What may still be told of this attempt is of no interest: the checkpoint is durable."""
        self._over.add((generation, step))

    def over(self, event: Saved) -> None:
        """The controller has heard of the end of an attempt."""
        self._over.add((event.generation, event.step))
        self._open.pop((event.generation, event.step), None)

    def pending(self, generation: int | None = None) -> bool:
        """Whether an attempt is under way (of ``generation``)."""
        return any(generation is None or key[0] == generation for key in self._open)

    def _close(self, drain: _Drain, problem: str | None) -> None:
        drain.closing = True
        # In a thread: on slow storage this takes seconds, in which faults must still be heard.
        threading.Thread(target=self._finish, args=(drain, problem), name="commit", daemon=True).start()

    def _finish(self, drain: _Drain, problem: str | None) -> None:
        fenced, nbytes = False, 0
        try:
            writer = self._vault.writer(drain.step, drain.token)
            if problem is None:
                slices = [Slice.from_json(row) for rows in drain.shards.values() for row in rows]
                writer.commit(slices, drain.meta, expected=drain.expected)
                nbytes = sum(item.nbytes for item in slices)
            else:
                writer.abort()
        except CheckpointError as error:
            problem, fenced = str(error), isinstance(error, Fenced)
        except Exception as error:  # whatever it is, somebody waits for the answer
            problem = f"{type(error).__name__}: {error}"
        self._tell(Saved(drain.generation, drain.step, time.monotonic() - drain.began, problem, fenced, nbytes))
