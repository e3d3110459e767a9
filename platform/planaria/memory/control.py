"""The page that a worker and its node's keeper share: what one must know of the other without asking.

Every word has one writer at a time and is written whole, so neither needs a lock.
"""

from __future__ import annotations

import mmap
import struct

WORDS = 8
NBYTES = WORDS * 8
_WORD = struct.Struct("@Q")
_REPLICATED, _BUFFERS, _PINNED = range(3)


class ControlPage:
    """View of the shared page."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    @property
    def replicated(self) -> int | None:
        """Newest step whose slices are where they should be; the keeper's word."""
        return self._get(_REPLICATED) - 1 if self._get(_REPLICATED) else None

    @replicated.setter
    def replicated(self, step: int) -> None:
        self._set(_REPLICATED, step + 1)

    @property
    def buffers(self) -> int:
        """How many buffers there are by now; the keeper's word."""
        return self._get(_BUFFERS)

    @buffers.setter
    def buffers(self, count: int) -> None:
        self._set(_BUFFERS, count)

    @property
    def pinned(self) -> int | None:
        """The buffer that is being written to durable storage: set by the worker, cleared by the keeper."""
        return self._get(_PINNED) - 1 if self._get(_PINNED) else None

    @pinned.setter
    def pinned(self, buffer: int | None) -> None:
        self._set(_PINNED, 0 if buffer is None else buffer + 1)

    def _get(self, word: int) -> int:
        return int(_WORD.unpack_from(self._memory, word * 8)[0])

    def _set(self, word: int, value: int) -> None:
        _WORD.pack_into(self._memory, word * 8, value)
