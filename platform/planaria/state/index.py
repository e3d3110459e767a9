"""The slice index: which file holds which box of which tensor. Pure: no torch, no files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from planaria.state.boxes import Box, uncovered

SHARD_NAME = re.compile(r"shard-\d{5,}(-[A-Za-z0-9_-]+)?\.safetensors")


class SliceError(ValueError):
    """Slices that contradict each other or their tensor."""


@dataclass(frozen=True, slots=True)
class Slice:
    """One stored piece of one tensor. Plain data: it travels between processes.

    Attributes:
        tensor: global name, such as ``model/<fqn>`` or ``optim/exp_avg/<fqn>``.
        global_shape: shape of the whole tensor.
        dtype: safetensors code, such as ``F32`` or ``BF16``.
        box: the part of the global tensor that is stored.
        file: name of the shard file, without a folder.
        key: name of the piece inside that file.
        checksums: digests of the piece's blocks, one after the other (see :mod:`planaria.state.checksum`).
        nbytes: size of the piece.
    """

    tensor: str
    global_shape: tuple[int, ...]
    dtype: str
    box: Box
    file: str
    key: str
    checksums: bytes
    nbytes: int

    def to_json(self) -> dict[str, Any]:
        """As a tree of plain JSON values."""
        return {"tensor": self.tensor, "global_shape": list(self.global_shape), "dtype": self.dtype, **_stored(self)}

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Slice:
        """Inverse of :meth:`to_json`."""
        return _slice(tree["tensor"], tuple(tree["global_shape"]), tree["dtype"], tree)

    def __str__(self) -> str:
        return f"{self.tensor}{self.box}"


@dataclass
class Index:
    """Mapping from tensor name to its slices."""

    tensors: dict[str, list[Slice]] = field(default_factory=dict)
    _files: set[str] = field(default_factory=set, repr=False, compare=False)
    _tiled: set[str] = field(default_factory=set, repr=False, compare=False)
    """Tensors whose slices are known to cover them without an overlap."""

    @classmethod
    def of(cls, slices: Iterable[Slice]) -> Index:
        """Index of ``slices``.

        Raises:
            SliceError: slices of one tensor disagree on its shape or dtype, or exceed it.
        """
        index = cls()
        for item in slices:
            index.add(item)
        return index

    def add(self, item: Slice) -> None:
        """Add one slice; see :meth:`of`."""
        if not item.box.fits(item.global_shape):
            raise SliceError(f"slice {item} exceeds its tensor of shape {item.global_shape}")
        if item.file not in self._files:
            if not SHARD_NAME.fullmatch(item.file):
                raise SliceError(f"slice {item} names the file {item.file!r}; expected shard-NNNNN.safetensors")
            self._files.add(item.file)
        known = self.tensors.setdefault(item.tensor, [])
        if known and (known[0].global_shape, known[0].dtype) != (item.global_shape, item.dtype):
            raise SliceError(
                f"{item.tensor}: {known[0].file} holds it as {known[0].dtype} {known[0].global_shape}, "
                f"{item.file} as {item.dtype} {item.global_shape}"
            )
        known.append(item)
        self._tiled.discard(item.tensor)

    def __iter__(self) -> Iterator[Slice]:
        for slices in self.tensors.values():
            yield from slices

    def by_file(self) -> dict[str, list[Slice]]:
        """Slices of every file."""
        files: dict[str, list[Slice]] = {}
        for item in self:
            files.setdefault(item.file, []).append(item)
        return files

    def missing(self) -> dict[str, list[Box]]:
        """The parts that no slice holds, by tensor; empty when every tensor is complete."""
        gaps: dict[str, list[Box]] = {}
        for name, slices in self.tensors.items():
            # In order of offset the uncovered rest stays one box for the usual grids of shards.
            pieces = sorted(item.box for item in slices)
            whole = Box.whole(slices[0].global_shape)
            if rest := uncovered(whole, pieces):
                gaps[name] = rest
            elif sum(piece.numel for piece in pieces) == whole.numel:
                self._tiled.add(name)  # all of it is covered, and there is nothing left to cover it twice with
        return gaps

    def lookup(self, tensor: str, box: Box) -> list[tuple[Slice, Box]]:
        """Slices that together fill ``box``, each with the part of ``box`` that it holds.

        Where slices overlap (replicas), the ones with the largest part of ``box`` are taken first and
        those that add nothing are left out: a greedy cover, exact for replicas and disjoint shards.

        Raises:
            KeyError: no such tensor.
            SliceError: ``box`` is not inside the tensor, or part of it is not held.
        """
        slices = self.tensors[tensor]
        shape = slices[0].global_shape
        if not box.fits(shape):
            raise SliceError(f"{tensor}{box} exceeds its tensor of shape {shape}")
        found = [(item, common) for item in slices if (common := item.box.intersect(box))]
        if tensor in self._tiled:
            return found if not box.empty else []
        found.sort(key=lambda pair: (-pair[1].numel, pair[0].nbytes, pair[1].offset))
        rest = [] if box.empty else [box]
        chosen: list[tuple[Slice, Box]] = []
        for item, common in found:
            if not rest:
                break
            left = [piece for part in rest for piece in part.subtract(common)]
            if left != rest:
                chosen.append((item, common))
                rest = left
        if rest:
            raise SliceError(f"{tensor}{box}: no slice holds {', '.join(map(str, rest))}")
        return chosen

    def to_json(self) -> dict[str, Any]:
        """As a tree of plain JSON values."""
        return {
            name: {
                "shape": list(slices[0].global_shape),
                "dtype": slices[0].dtype,
                "slices": [_stored(item) for item in slices],
            }
            for name, slices in sorted(self.tensors.items())
        }

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Index:
        """Inverse of :meth:`to_json`."""
        return cls.of(
            _slice(name, tuple(entry["shape"]), entry["dtype"], stored)
            for name, entry in tree.items()
            for stored in entry["slices"]
        )


def _stored(item: Slice) -> dict[str, Any]:
    return {
        "offset": list(item.box.offset),
        "size": list(item.box.shape),
        "file": item.file,
        "key": item.key,
        "checksums": item.checksums.hex(),
        "nbytes": item.nbytes,
    }


def _slice(tensor: str, global_shape: tuple[int, ...], dtype: str, stored: Mapping[str, Any]) -> Slice:
    box = Box(tuple(stored["offset"]), tuple(stored["size"]))
    checksums = bytes.fromhex(stored["checksums"])
    return Slice(tensor, global_shape, dtype, box, stored["file"], stored["key"], checksums, stored["nbytes"])
