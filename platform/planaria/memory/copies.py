"""A copy of another node's snapshot that arrives: where it goes, and what makes it valid."""

from __future__ import annotations

import time

from planaria.memory.buffers import MemoryTooSmall, Seal, break_seal, read_seal, write_seal
from planaria.memory.shelf import REPLICA_BUFFERS, NotHeld, Stack
from planaria.state.checksum import DIGEST_BYTES, digest

ALLOCATION_S = 120.0
"""Longest wait of an arriving copy for its memory to be allocated."""


def begin_replica(stack: Stack, complete: int | None) -> int | None:
    """The buffer into which a copy is to be received: never the one that holds the ``complete`` step; None if there
    is no other.

    Its seal is broken; :func:`finish_replica` sets the new one.
    """
    steps = [read_seal(buffer.map) for buffer in stack.buffers]
    free = [at for at, seal in enumerate(steps) if seal is None or seal.step != complete]
    if not free:
        return None
    chosen = min(free, key=lambda at: -1 if (seal := steps[at]) is None else seal.step)
    break_seal(stack.buffers[chosen].map)
    return chosen


def room_for_copy(stack: Stack, complete: int | None) -> int:
    """As :func:`begin_replica`, once the memory has been allocated.

    Raises:
        MemoryTooSmall: there is not enough.
        NotHeld: the stack has been given up meanwhile.
    """
    deadline = time.monotonic() + ALLOCATION_S
    while (buffer := begin_replica(stack, complete)) is None:
        if stack.closed:
            raise NotHeld(f"generation {stack.generation} is over")
        if stack.trouble:
            raise MemoryTooSmall(stack.trouble)
        if len(stack.buffers) >= REPLICA_BUFFERS or time.monotonic() > deadline:
            raise NotHeld(f"no memory became free for copies of {stack.owner}")
        time.sleep(0.002)
    return buffer


def finish_replica(stack: Stack, buffer: int, step: int, digests: bytes) -> None:
    """Check a copy that has arrived and make it valid.

    Raises:
        NotHeld: its bytes are not those that were sent, or the stack has been given up meanwhile.
    """
    if stack.closed:
        raise NotHeld(f"generation {stack.generation} is over")
    for at, entry in enumerate(stack.table.entries):
        if digest(stack.entry_view(buffer, at)) != digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]:
            raise NotHeld(f"{entry} of step {step} arrived damaged")
    for old in [key for key in stack.checksums if key[0] == buffer]:
        del stack.checksums[old]
    stack.checksums[buffer, step] = digests
    write_seal(stack.buffers[buffer].map, Seal(stack.generation, step))
