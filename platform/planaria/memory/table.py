"""What one rank's snapshot holds, and at which byte. Pure: no torch, no files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from planaria.state.boxes import Box
from planaria.state.checksum import checksum

ALIGNMENT = 64
"""Bytes; of every entry, so that vector copies and any dtype's view are aligned."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One slice of a snapshot.

    Attributes:
        tensor: global name, such as ``model/<fqn>`` or ``optim/exp_avg/<fqn>``.
        global_shape: shape of the whole tensor.
        dtype: safetensors code.
        box: the part of the global tensor that is held.
        offset: first byte in the data area of the snapshot.
        nbytes: size.
        primary: whether this rank writes the slice to checkpoints (one rank per box does).
        lead: whether this rank has the slice copied to other nodes (one rank per box does).
        nodes: nodes whose ranks hold the very slice anyway, this one included.
    """

    tensor: str
    global_shape: tuple[int, ...]
    dtype: str
    box: Box
    offset: int
    nbytes: int
    primary: bool = True
    lead: bool = True
    nodes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.tensor}{self.box}"


@dataclass(frozen=True)
class Table:
    """All slices of a snapshot, in order of their offsets.

    Attributes:
        entries: the slices.
        expected: name and global shape of every tensor of the whole state, whoever holds it.
    """

    entries: tuple[Entry, ...]
    expected: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, entries: Iterable[Entry], expected: Mapping[str, Sequence[int]]) -> Table:
        """Table of ``entries`` with offsets given out; slices that travel together lie together."""
        ordered = sorted(entries, key=lambda entry: (not entry.lead, entry.nodes))
        placed: list[Entry] = []
        offset = 0
        for entry in ordered:
            placed.append(replace(entry, offset=offset))
            offset = aligned(offset + entry.nbytes)
        return cls(tuple(placed), {name: tuple(shape) for name, shape in expected.items()})

    @property
    def nbytes(self) -> int:
        """Size of the data area."""
        return aligned(self.entries[-1].offset + self.entries[-1].nbytes) if self.entries else 0

    def runs(self, chosen: Sequence[int]) -> list[tuple[int, int]]:
        """Byte ranges of the data area that hold the entries ``chosen`` (ascending), as few as possible."""
        ranges: list[tuple[int, int]] = []
        for index in chosen:
            entry = self.entries[index]
            start, stop = entry.offset, aligned(entry.offset + entry.nbytes)
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], stop)
            else:
                ranges.append((start, stop))
        return ranges

    def subset(self, chosen: Sequence[int]) -> Table:
        """Table of the bytes of ``runs(chosen)``, put one behind the other."""
        placed: list[Entry] = []
        offset = 0
        for index in chosen:
            entry = self.entries[index]
            placed.append(replace(entry, offset=offset))
            offset += aligned(entry.nbytes)
        return Table(tuple(placed), self.expected)

    @cached_property
    def digest(self) -> str:
        """Names the table: equal for equal tables."""
        return checksum(self.encoded)

    @cached_property
    def encoded(self) -> bytes:
        """As JSON."""
        tree = {
            "expected": {name: list(shape) for name, shape in self.expected.items()},
            "entries": [
                [e.tensor, e.dtype, e.box.offset, e.box.shape, e.offset, e.nbytes, e.primary, e.lead, e.nodes]
                for e in self.entries
            ],
        }
        return json.dumps(tree, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, raw: bytes | bytearray) -> Table:
        """Inverse of :attr:`encoded`."""
        tree = json.loads(raw)
        expected = {name: tuple(shape) for name, shape in tree["expected"].items()}
        entries = tuple(
            Entry(name, expected[name], dtype, Box(tuple(start), tuple(size)), offset, nbytes, primary, lead, tuple(at))
            for name, dtype, start, size, offset, nbytes, primary, lead, at in tree["entries"]
        )
        return cls(entries, expected)

    def __getstate__(self) -> bytes:
        return self.encoded  # one blob travels faster than thousands of small objects

    def __setstate__(self, raw: bytes) -> None:
        other = Table.decode(raw)
        object.__setattr__(self, "entries", other.entries)
        object.__setattr__(self, "expected", other.expected)


def aligned(offset: int) -> int:
    """The next multiple of :data:`ALIGNMENT`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT
