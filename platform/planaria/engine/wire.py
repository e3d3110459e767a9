"""Bytes on the wire, counted where they are sent: exact, and the same on every machine.

What is counted is the payload that one rank sends with the algorithms that need least: a ring for all-reduce and
all-gather, every piece straight to its receiver for all-to-all. Headers of the transport are not in it.
"""

from __future__ import annotations

from collections import Counter


def all_reduce_bytes(nbytes: int, ranks: int) -> int:
    """What each of ``ranks`` sends to all-reduce ``nbytes``: a reduce-scatter and an all-gather of pieces, rounded
    up to whole bytes."""
    return -(-2 * (ranks - 1) * nbytes // ranks)


def all_gather_bytes(piece: int, ranks: int) -> int:
    """What each of ``ranks`` sends so that all get everyone's ``piece`` bytes."""
    return (ranks - 1) * piece


def all_to_all_bytes(piece: int, ranks: int) -> int:
    """What each of ``ranks`` sends if everyone sends ``piece`` bytes to every other."""
    return (ranks - 1) * piece


class Wire:
    """Counter of the bytes that this rank has sent, by mesh axis."""

    def __init__(self) -> None:
        self._sent: Counter[str] = Counter()

    def add(self, axis: str, nbytes: int) -> None:
        """Count ``nbytes`` sent along ``axis``."""
        self._sent[axis] += nbytes

    def sent(self, axis: str) -> int:
        """Bytes sent along ``axis`` since the engine was made."""
        return self._sent[axis]
