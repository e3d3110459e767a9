"""Memory to be used again and again: fresh memory costs a page fault every few KiB."""

from __future__ import annotations

import numpy as np


class Memory:
    """Grows to the largest size that was asked for."""

    def __init__(self) -> None:
        self._held = np.empty(0, np.uint8).data

    def __call__(self, nbytes: int) -> memoryview:
        """So many bytes of it, valid until the next call."""
        if len(self._held) < nbytes:
            self._held = np.empty(nbytes, np.uint8).data
        return self._held[:nbytes]


class Scratch:
    """What one reader needs beside the memory that it fills.

    Attributes:
        rows: for rows of which only a part is wanted.
        block: for a block of which only a part is wanted.
    """

    def __init__(self) -> None:
        self.rows, self.block = Memory(), Memory()
