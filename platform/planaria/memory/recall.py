"""State out of the memory of the nodes that live: what this node holds by itself, the rest from other keepers."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from mmap import mmap

import torch
from torch import Tensor

from planaria.memory.buffers import HEADER_BYTES, map_buffer
from planaria.memory.coverage import Holding
from planaria.memory.table import Entry, Table
from planaria.memory.wire import KeeperAddress, KeeperError, KeeperLink
from planaria.state.boxes import Box, uncovered
from planaria.state.checksum import DIGEST_BYTES, digest
from planaria.state.dtypes import dtype_of
from planaria.state.shard import bytes_of

ANSWER_S = 180.0
"""Longest silence of a keeper: before it hands out many gigabytes it compares them with their checksums."""


@dataclass(frozen=True)
class MemorySource:
    """A state that memory covers completely, and who holds it."""

    generation: int
    step: int
    holdings: tuple[Holding, ...]
    tables: dict[str, Table]
    keepers: dict[str, KeeperAddress]
    """By node."""


@dataclass
class _Part:
    """Rows of an entry that fill ``box`` of a wanted tensor, once the other columns are cut off."""

    holding: Holding
    at: int
    entry: Entry
    box: Box
    target: Tensor

    @property
    def rows(self) -> tuple[int, int]:
        """(first byte, bytes) of the rows of the entry that contain the box."""
        if not self.entry.box.shape:
            return 0, self.entry.nbytes
        row = self.entry.nbytes // self.entry.box.shape[0]
        return (self.box.offset[0] - self.entry.box.offset[0]) * row, self.box.shape[0] * row

    def copy_from(self, rows: Tensor) -> None:
        """Fill the target from the rows."""
        columns = self.box.relative_to(self.entry.box)[1:]
        self.target.copy_(rows[(slice(None), *columns)] if columns else rows)


@dataclass
class MemoryState:
    """Implements :class:`planaria.recipe.StateReader` over a :class:`MemorySource`.

    Everything that will be asked for is named at once, so that it can be fetched from all keepers in parallel.

    Args:
        source: the state.
        node: this process's node, whose memory is read without a network.
        rank: spreads the ranks over the nodes that hold the same slice.
        wanted: (tensor, box) pairs that will be read.

    Raises:
        KeeperError: a keeper is gone, or its memory is damaged.
    """

    source: MemorySource
    node: str
    rank: int
    wanted: Iterable[tuple[str, Box]]
    local_bytes: int = 0
    remote_bytes: int = 0
    _read: dict[tuple[str, Box], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        held = self._by_tensor()
        local: list[_Part] = []
        remote: dict[str, list[_Part]] = {}
        for name, box in self.wanted:
            if (name, box) in self._read or name not in held:
                continue
            result = torch.empty(box.shape, dtype=dtype_of(held[name][0][2].dtype))
            self._read[name, box] = result
            for part in self._parts(box, held[name], result):
                if part.holding.node == self.node:
                    local.append(part)
                else:
                    remote.setdefault(part.holding.node, []).append(part)
        failures: list[BaseException] = []
        threads = [
            threading.Thread(target=self._fetch, args=(node, parts, failures), daemon=True)
            for node, parts in remote.items()
        ]
        for thread in threads:
            thread.start()
        try:
            self._copy_local(local)
        finally:
            for thread in threads:
                thread.join()
        if failures:
            raise failures[0]

    @property
    def step(self) -> int:
        """Steps completed in this state."""
        return self.source.step

    @property
    def tensors(self) -> frozenset[str]:
        """Names of all wanted tensors that the state has."""
        return frozenset(name for name, _ in self._read)

    def read(self, tensor: str, box: Box) -> Tensor:
        """A wanted part; raises KeyError for anything else."""
        return self._read[tensor, box]

    def _by_tensor(self) -> dict[str, list[tuple[Holding, int, Entry]]]:
        held: dict[str, list[tuple[Holding, int, Entry]]] = {}
        nodes = sorted({holding.node for holding in self.source.holdings})
        turn = {node: (at - self.rank) % len(nodes) for at, node in enumerate(nodes)}
        # The own node first, then the others, each rank beginning with another one.
        for holding in sorted(self.source.holdings, key=lambda h: (h.node != self.node, turn[h.node], h.replica)):
            for at, entry in enumerate(self.source.tables[holding.table].entries):
                held.setdefault(entry.tensor, []).append((holding, at, entry))
        return held

    @staticmethod
    def _parts(box: Box, held: Sequence[tuple[Holding, int, Entry]], result: Tensor) -> list[_Part]:
        rest = [] if box.empty else [box]
        found: list[_Part] = []
        for holding, at, entry in held:
            if not rest:
                break
            common = entry.box.intersect(box)
            if common is not None and any(left.intersect(common) for left in rest):
                found.append(_Part(holding, at, entry, common, result[common.relative_to(box)]))
                rest = uncovered(box, [part.box for part in found])
        if rest:
            raise KeeperError(f"memory does not hold {', '.join(map(str, rest))} of a tensor that it should cover")
        return found

    def _copy_local(self, parts: list[_Part]) -> None:
        if not parts:
            return
        link = KeeperLink(self.source.keepers[self.node], ANSWER_S)
        try:
            for holding, group in _by_holding(parts):
                link.call({"op": "verify", "entries": sorted({part.at for part in group}), **_name(holding)})
                memory = map_buffer(holding.path, writable=False)
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "The given buffer is not writable")  # nor is it written to
                    for part in group:
                        start, count = part.rows
                        part.copy_from(_tensor(memory, HEADER_BYTES + part.entry.offset + start, count, part))
                        self.local_bytes += count
        finally:
            link.close()

    def _fetch(self, node: str, parts: list[_Part], failures: list[BaseException]) -> None:
        try:
            link = KeeperLink(self.source.keepers[node], ANSWER_S)
            try:
                for holding, group in _by_holding(parts):
                    self._fetch_group(link, holding, group)
            finally:
                link.close()
        except BaseException as error:
            failures.append(error)

    def _fetch_group(self, link: KeeperLink, holding: Holding, group: list[_Part]) -> None:
        asked = [[part.at, *part.rows] for part in group]
        link.call({"op": "fetch", "parts": asked, **_name(holding)})
        digests = link.channel.receive_bytes(DIGEST_BYTES * len(group))
        for at, part in enumerate(group):
            shape = _row_shape(part)
            # Rows that are all of the target arrive right in their place.
            direct = part.target if tuple(part.target.shape) == shape and part.target.is_contiguous() else None
            rows = torch.empty(shape, dtype=part.target.dtype) if direct is None else direct
            if rows.numel():
                link.channel.receive_into(bytes_of(rows))
            if digest(bytes_of(rows)) != digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]:
                raise KeeperError(f"{part.entry} arrived damaged from node {holding.node[:8]}")
            if direct is None:
                part.copy_from(rows)
            self.remote_bytes += part.rows[1]


def _by_holding(parts: list[_Part]) -> list[tuple[Holding, list[_Part]]]:
    groups: dict[Holding, list[_Part]] = {}
    for part in parts:
        groups.setdefault(part.holding, []).append(part)
    return list(groups.items())


def _name(holding: Holding) -> dict[str, object]:
    return {
        "gen": holding.generation,
        "owner": holding.owner,
        "replica": holding.replica,
        "step": holding.step,
    }


def _row_shape(part: _Part) -> tuple[int, ...]:
    shape = part.entry.box.shape
    return (part.box.shape[0], *shape[1:]) if shape else ()


def _tensor(memory: mmap, offset: int, nbytes: int, part: _Part) -> Tensor:
    dtype = part.target.dtype
    flat = torch.frombuffer(memory, dtype=dtype, count=nbytes // dtype.itemsize, offset=offset)
    return flat.view(_row_shape(part))
