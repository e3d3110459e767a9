"""The order of a whole data set: sources are mixed, shards are shuffled, and samples within blocks of them. Pure.

Position p of the run is drawn from one of the sources (:mod:`planaria.data.mixing`); each source has epochs of its own.
In each epoch of a source, its shards are permuted, ``block`` of them in a row make a block, and the samples of a block
are permuted: so whoever reads on has ``block`` shards in use at a time, and not all of them. Without ``block``, the
whole source is one block. Everything is a function of (sizes, seed, position): ranks, loaders and nodes appear nowhere.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planaria.data.identity import shards_of
from planaria.data.mixing import Draw, parts_of
from planaria.data.order import candidate, indices

I64 = NDArray[np.int64]


@dataclass(frozen=True)
class SourceShape:
    """What the order has to know of a source."""

    shards: tuple[int, ...]
    """Samples in each, in order."""
    name: str = ""
    weight: float = 1.0

    @functools.cached_property  # asked for with every batch, and there may be very many shards
    def samples(self) -> int:
        """Of all shards."""
        return sum(self.shards)


class Order:
    """Dataset indices by position. Sources lie one behind the other in the data set."""

    def __init__(self, sources: Sequence[SourceShape], seed: int, shuffle: bool, block: int | None = None) -> None:
        """
        Args:
            sources: at least one, none of them empty.
            seed: of all permutations.
            shuffle: whether epochs are permuted at all.
            block: shards that are shuffled together; None: all of a source.

        Raises:
            ValueError: an empty source, weights that cannot be exact, or a block of no shard.
        """
        if block is not None and block < 1:
            raise ValueError(f"a block of {block} shards; it needs at least one")
        for source in sources:
            if source.samples < 1:
                raise ValueError(f"the source {source.name!r} has no samples")
        self.draw = Draw(parts_of([source.weight for source in sources]))
        self.sources, self._seed, self._shuffle, self._block = tuple(sources), seed, shuffle, block
        self._starts = np.cumsum([0, *(source.samples for source in sources)])
        self._epochs: dict[tuple[int, int], _Blocks] = {}
        """The newest, by (source, epoch)."""

    def __len__(self) -> int:
        return int(self._starts[-1])

    def indices(self, start: int, stop: int) -> list[int]:
        """Dataset indices of positions [start, stop).

        Raises:
            ValueError: the range is negative or runs backwards.
        """
        if not 0 <= start <= stop:
            raise ValueError(f"positions [{start}, {stop}) are negative or run backwards")
        drawn, nth = self.draw.at(np.arange(start, stop, dtype=np.int64))
        found = np.empty(stop - start, np.int64)
        for number, base in enumerate(self._starts[:-1]):
            mine = np.flatnonzero(drawn == number)
            if len(mine):  # the draws of one source within a range follow one another
                first = int(nth[mine[0]])
                found[mine] = base + self._source(number, first, first + len(mine))
        return [int(index) for index in found]

    def substitute(self, position: int, attempt: int) -> int:
        """Dataset index of the ``attempt``-th candidate (>= 0) for a position; 0 is the one in order.

        A function of the position, not of what was read before; of the same source, so that shares stay what they are.
        """
        if attempt == 0:
            return self.indices(position, position + 1)[0]
        (number,), _ = self.draw.at(np.array([position], np.int64))
        size = self.sources[int(number)].samples
        return int(self._starts[number]) + candidate(position, attempt, size, self._seed, self._shuffle)

    def epochs(self, position: int) -> list[float]:
        """Epochs of each source that are consumed before ``position``."""
        drawn = self.draw.counts(position)
        return [count / source.samples for count, source in zip(drawn, self.sources, strict=True)]

    def _source(self, number: int, start: int, stop: int) -> I64:
        source = self.sources[number]
        # A mixture may name two sources with the same sizes: they must not be read in the same order.
        seed = self._seed if len(self.sources) == 1 else _derived(self._seed, "source", source.name)
        if not self._shuffle or self._block is None or self._block >= len(source.shards):
            return np.array(indices(start, stop, source.samples, seed, self._shuffle), np.int64)
        found: list[I64] = []
        while start < stop:
            epoch, offset = divmod(start, source.samples)
            end = min(stop, (epoch + 1) * source.samples)
            found.append(self._blocks(number, seed, epoch, self._block).read(offset, offset + end - start))
            start = end
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _blocks(self, number: int, seed: int, epoch: int, block: int) -> _Blocks:
        if (number, epoch) not in self._epochs:
            self._epochs.pop((number, epoch - 2), None)
            self._epochs[number, epoch] = _Blocks(self.sources[number].shards, seed, epoch, block)
        return self._epochs[number, epoch]


def shapes_of(dataset: Any) -> list[SourceShape]:
    """Of an open data set: of the sources of a mixture, of its shards, or of its length alone."""
    mixed = getattr(dataset, "sources", None)
    if mixed is not None:
        return [SourceShape(_shards(one.dataset), one.name, one.weight) for one in mixed]
    return [SourceShape(_shards(dataset))]


def order_of(dataset: Any, seed: int, shuffle: bool, block: int | None = None) -> Order:
    """The order of an open data set; see :class:`Order`."""
    return Order(shapes_of(dataset), seed, shuffle, block)


def _shards(dataset: Any) -> tuple[int, ...]:
    shards = shards_of(dataset)
    return (len(dataset),) if shards is None else tuple(shard.samples for shard in shards)


class _Blocks:
    """One epoch of one source, in blocks."""

    def __init__(self, shards: tuple[int, ...], seed: int, epoch: int, block: int) -> None:
        count = len(shards)
        self._seed, self._epoch = seed, epoch
        order = np.array(indices(epoch * count, (epoch + 1) * count, count, _derived(seed, "shards"), True))
        sizes = np.array(shards, np.int64)
        self._first = np.cumsum(np.concatenate([[0], sizes]))[:-1][order]  # dataset index of each shard's first sample
        self._ends = np.cumsum(sizes[order])
        self._befores = np.concatenate([[0], self._ends])
        edges = self._ends[[*range(block - 1, count - 1, block), count - 1]]
        self._edges = np.concatenate([[0], edges])

    def read(self, start: int, stop: int) -> I64:
        """Dataset indices at offsets [start, stop) of the epoch."""
        found = []
        while start < stop:
            number = int(np.searchsorted(self._edges, start, "right")) - 1
            low, high = int(self._edges[number]), int(self._edges[number + 1])
            end = min(stop, high)
            seed = _derived(self._seed, "block", self._epoch, number)
            inner = np.array(indices(start - low, end - low, high - low, seed, True), np.int64)
            found.append(self._unpermuted(low + inner))
            start = end
        return np.concatenate(found)

    def _unpermuted(self, offsets: I64) -> I64:
        shard = np.searchsorted(self._ends, offsets, "right")
        result: I64 = self._first[shard] + offsets - self._befores[shard]
        return result


def _derived(seed: int, *what: object) -> int:
    text = f"planaria order of {' '.join(map(str, what))} under {seed}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Quality:
    """How well an order is mixed, beside what it costs to read."""

    displacement: float
    """Mean distance between where a sample lies and where it is read, over the size; 1/3 for a uniform shuffle."""
    correlation: float
    """Of the indices of neighbours in the order: about 0 for a uniform shuffle, 1 for no shuffle."""
    shards: float
    """Mean number of different shards in a window."""


def quality(order: Sequence[int], shards: Sequence[int], window: int) -> Quality:
    """Of one epoch of one source.

    Args:
        order: dataset indices in the order in which they are read, at least three.
        shards: samples in each shard, in order.
        window: samples of a window, at most as many as the order has.
    """
    read = np.asarray(order, np.float64)
    displacement = np.abs(read - np.arange(len(read))).mean() / len(read)
    correlation = np.corrcoef(read[:-1], read[1:])[0, 1]
    shard = np.searchsorted(np.cumsum(shards), np.asarray(order), "right")
    windows = [shard[start : start + window] for start in range(0, len(shard) - window + 1, window)]
    return Quality(float(displacement), float(correlation), float(np.mean([len(set(w.tolist())) for w in windows])))
