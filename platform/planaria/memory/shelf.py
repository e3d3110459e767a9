"""What one node holds: the snapshots of its own workers, and copies of slices of others. Thread-safe.

Bookkeeping only; :mod:`planaria.memory.keeper` moves the bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from planaria.memory.buffers import HEADER_BYTES, Seal, SharedBuffer, break_seal, free_bytes, read_seal, too_small
from planaria.memory.control import NBYTES, ControlPage
from planaria.memory.coverage import Holding
from planaria.memory.table import Table
from planaria.state.checksum import DIGEST_BYTES, digest

OWN_BUFFERS = 2
REPLICA_BUFFERS = 2
Key = tuple[int, str]
"""(generation, owner)."""


class NotHeld(RuntimeError):
    """A request for a state that is not here, or no longer."""


@dataclass
class Stack:
    """The buffers of one owner in one generation: its snapshots, or copies of some of its slices."""

    generation: int
    owner: str
    replica: bool
    table: Table
    buffers: list[SharedBuffer] = field(default_factory=list)
    checksums: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """(buffer, step) -> digests of all entries, one behind the other."""
    control: SharedBuffer | None = None
    page: ControlPage | None = None
    lean: bool = False
    """Whether there is room for one buffer only."""
    trouble: str = ""
    """Why its memory could not be allocated."""
    closed: bool = False
    receiving: threading.Lock = field(default_factory=threading.Lock)
    """Held while a copy arrives: one whose sender gave up may still be on its way when the next one comes."""

    @property
    def size(self) -> int:
        """Bytes of one buffer."""
        return HEADER_BYTES + self.table.nbytes

    def buffer_of(self, step: int) -> int:
        """Index of the buffer that holds the complete snapshot of ``step``.

        Raises:
            NotHeld: there is none.
        """
        seal = Seal(self.generation, step)
        for index, buffer in enumerate(self.buffers):
            if read_seal(buffer.map) == seal:
                return index
        raise NotHeld(f"{self.owner}: no snapshot of step {step} of generation {self.generation} is held")

    def entry_view(self, buffer: int, entry: int) -> memoryview:
        """The bytes of one entry."""
        at = self.table.entries[entry]
        return self.buffers[buffer].data[at.offset : at.offset + at.nbytes]

    def digests(self, buffer: int, step: int) -> bytes:
        """Checksums of all entries, made at the first call."""
        known = self.checksums.get((buffer, step))
        if known is None:
            known = b"".join(digest(self.entry_view(buffer, at)) for at in range(len(self.table.entries)))
            for old in [key for key in self.checksums if key[0] == buffer]:
                del self.checksums[old]
            self.checksums[buffer, step] = known
        return known

    def intact(self, buffer: int, step: int, entry: int) -> bool:
        """Whether the bytes of an entry are still those that were checksummed."""
        start = entry * DIGEST_BYTES
        return digest(self.entry_view(buffer, entry)) == self.digests(buffer, step)[start : start + DIGEST_BYTES]

    def holdings(self, node: str) -> Iterator[Holding]:
        """Every complete snapshot."""
        for buffer in self.buffers:
            seal = read_seal(buffer.map)
            if seal is not None and seal.generation == self.generation:
                yield Holding(
                    node, self.owner, self.replica, seal.generation, seal.step, self.table.digest, buffer.path
                )

    def narrow(self, step: int) -> None:
        """Give back the memory of all snapshots but that of ``step``; the generation is over."""
        for at, buffer in enumerate(self.buffers):
            pinned = self.page is not None and self.page.pinned == at
            if not pinned and read_seal(buffer.map) != Seal(self.generation, step):
                break_seal(buffer.map)
                buffer.release()

    def close(self) -> None:
        """Give the memory back."""
        self.closed = True
        buffers = [*self.buffers, *([self.control] if self.control else [])]
        self.buffers, self.control, self.page = [], None, None
        for buffer in buffers:
            buffer.close()


class Shelf:
    """All stacks of a node."""

    def __init__(self, node: str, folder: str) -> None:
        self._node, self._folder = node, folder
        self._stacks: dict[tuple[Key, bool], Stack] = {}
        self._lock = threading.RLock()
        self._oldest = 0
        """Generations below are forgotten for good: a late word must not bring them back."""

    def open(self, generation: int, owner: str, table: Table, *, replica: bool, strict: bool) -> Stack:
        """A new stack, with its control page; the buffers are allocated by :meth:`grow`.

        A stack of copies that is there already stays as it is, with what it holds, if the table is the same.

        Args:
            strict: whether to refuse, instead of making do with a single buffer, where memory is short.

        Raises:
            MemoryTooSmall: there is not enough memory.
        """
        with self._lock:
            if generation < self._oldest:
                raise NotHeld(f"generation {generation} is over")
            old = self._stacks.get(((generation, owner), replica))
            if old is not None and replica and old.table.digest == table.digest:
                old.trouble = ""
                return old
            stack = Stack(generation, owner, replica, table)
            wanted = (REPLICA_BUFFERS if replica else OWN_BUFFERS) * stack.size
            # What older generations hold is given up as soon as this one has a complete snapshot.
            free = free_bytes(self._folder) + self._bytes(below=generation)
            promised = self._promised(generation)
            if wanted + promised > free:
                stack.lean = not strict and not replica and stack.size + promised <= free
                if not stack.lean:
                    raise too_small(self._folder, wanted + promised, free)
            if not replica:
                stack.control = SharedBuffer(self._folder, NBYTES)
                stack.page = ControlPage(stack.control.map)
            self._stacks[(generation, owner), replica] = stack
        if old is not None:
            old.close()
        return stack

    def _promised(self, generation: int) -> int:
        """Bytes that stacks of this generation have still to allocate."""
        total = 0
        for stack in self._stacks.values():
            if stack.generation == generation:
                count = 1 if stack.lean else REPLICA_BUFFERS if stack.replica else OWN_BUFFERS
                total += max(0, count - len(stack.buffers)) * stack.size
        return total

    def grow(self, stack: Stack, most: int) -> bool:
        """Allocate one more buffer, unless there are ``most``; returns whether there are fewer still.

        Takes as long as the machine needs to clear so much memory.

        Raises:
            MemoryTooSmall: it does not fit, or no longer.
            NotHeld: the stack has been given up.
        """
        if not self.holds(stack):
            raise NotHeld(f"generation {stack.generation} is over")
        if len(stack.buffers) >= most:
            return False
        if stack.size > (free := free_bytes(self._folder)):
            raise too_small(self._folder, stack.size, free)
        buffer = SharedBuffer(self._folder, stack.size)
        with self._lock:
            if self.holds(stack) and len(stack.buffers) < most:
                stack.buffers.append(buffer)
                if stack.page is not None:
                    stack.page.buffers = len(stack.buffers)
                return len(stack.buffers) < most
        buffer.close()
        if not self.holds(stack):
            raise NotHeld(f"generation {stack.generation} is over")
        return False

    def holds(self, stack: Stack) -> bool:
        """Whether the stack has not been given up."""
        with self._lock:
            return self._stacks.get(((stack.generation, stack.owner), stack.replica)) is stack

    def get(self, generation: int, owner: str, *, replica: bool) -> Stack:
        """A stack.

        Raises:
            NotHeld: there is none.
        """
        with self._lock:
            stack = self._stacks.get(((generation, owner), replica))
        if stack is None:
            raise NotHeld(f"nothing of {owner} in generation {generation} is held")
        return stack

    def holdings(self) -> tuple[list[Holding], dict[str, Table]]:
        """Every complete snapshot, and the tables that describe them by their digests."""
        with self._lock:
            stacks = list(self._stacks.values())
            found = [holding for stack in stacks for holding in stack.holdings(self._node)]
        return found, {stack.table.digest: stack.table for stack in stacks}

    def forget(self, below: int, keep: int | None = None, step: int | None = None) -> None:
        """Drop everything of generations before ``below``, but of ``keep`` the state of ``step`` (or all)."""
        with self._lock:
            self._oldest = max(self._oldest, below)
            old = [key for key, s in self._stacks.items() if s.generation < below and s.generation != keep]
            stacks = [self._stacks.pop(key) for key in old]
            kept = [] if step is None else [s for s in self._stacks.values() if s.generation == keep]
        for stack in stacks:  # not under the lock: it takes a while to free many gigabytes
            stack.close()
        for stack in kept:
            stack.narrow(step)  # type: ignore[arg-type]

    def drop(self, stack: Stack, buffer: int) -> None:
        """Forget a snapshot that turned out damaged."""
        break_seal(stack.buffers[buffer].map)

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory in use."""
        with self._lock:
            return self._bytes()

    def _bytes(self, below: int | None = None) -> int:
        return sum(
            buffer.nbytes
            for stack in self._stacks.values()
            for buffer in stack.buffers
            if below is None or stack.generation < below
        )

    def close(self) -> None:
        """Give everything back."""
        self.forget(1 << 62)
