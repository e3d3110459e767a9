"""Any slice of any batch, built from (number of the batch, offsets) alone. No state, hence nothing to restore."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from planaria.data.errors import DataError
from planaria.data.ordering import order_of
from planaria.data.plan import micro_batches
from planaria.recipe import BadSample, Dataset, MicroBatch

TRIES = 16
"""Substitutes that are tried for one damaged sample."""

Collate = Callable[[Sequence[Any], Sequence[int]], MicroBatch]


@dataclass(frozen=True)
class BadRecord:
    """One damaged sample that was met, at its place in the global order."""

    position: int
    """Position in the global order (in an evaluation: the dataset index)."""
    index: int
    """Dataset index of the damaged sample."""
    attempt: int
    """0 for the sample that the order asked for, k for the k-th substitute."""
    key: str
    cause: str


@dataclass(frozen=True)
class BuiltSlice:
    """The micro-batches of one rank and step, and the damaged samples met on the way."""

    micro_batches: list[MicroBatch]
    bad: list[BadRecord]


@dataclass(frozen=True)
class EvalBatch:
    """Some held-out samples in one micro-batch."""

    batch: MicroBatch
    choices: list[int]
    """Per row of the request: how many answers its question admits; 0 for captions, fillers and damaged samples."""
    bad: list[BadRecord]


class BatchBuilder:
    """Reads, collates and substitutes. Any builder with the same arguments builds the same batches."""

    def __init__(
        self, dataset: Dataset, collate: Collate, seed: int, global_batch: int, shuffle: bool, block: int | None = None
    ) -> None:
        """
        Args:
            dataset: the samples.
            collate: ``Recipe.collate``.
            seed: of the order and of the substitutes.
            global_batch: samples per step, over all ranks.
            shuffle: whether each epoch is permuted.
            block: shards that are shuffled together; None: all of them.

        Raises:
            DataError: the data set is empty.
            ValueError: ``global_batch`` is not positive.
        """
        if global_batch < 1:
            raise ValueError(f"global_batch={global_batch} must be at least 1")
        if len(dataset) < 1:
            raise DataError(type(dataset).__name__, "the data set has no samples", "check the path and the split")
        self._dataset = dataset
        self._collate = collate
        self._global_batch = global_batch
        self._order = order_of(dataset, seed, shuffle, block)
        self._filler_sample: Any = None

    def build(self, number: int, lo: int, hi: int, count: int) -> BuiltSlice:
        """Offsets [lo, hi) of batch ``number`` (see :mod:`planaria.data.skips`), as exactly ``count`` micro-batches.

        Every micro-batch lists in ``ids`` the dataset indices it consumes, in order, substitutes included. An
        empty one holds a single filler of weight 0.

        Raises:
            ValueError: the offsets lie outside the batch, or ``count`` is not positive.
            DataError: a damaged sample for which no substitute was found.
            OSError: whatever the data set lets through; the same call may be tried again.
        """
        if number < 0 or not 0 <= lo <= hi <= self._global_batch:
            raise ValueError(f"batch {number}, offsets [{lo}, {hi}) lie outside batches of {self._global_batch}")
        bad: list[BadRecord] = []
        built: list[MicroBatch] = []
        first = number * self._global_batch
        for start, stop in micro_batches(lo, hi, count):
            wanted = self._order.indices(first + start, first + stop)
            found = [self._healthy(first + start + at, index, bad) for at, index in enumerate(wanted)]
            if found:
                batch = self._collate([sample for _, sample in found], [1] * len(found))
            else:
                batch = self._collate([self._filler()], [0])
            batch.ids = [index for index, _ in found]
            built.append(batch)
        return BuiltSlice(built, bad)

    def eval_batch(self, start: int, stop: int, rows: int) -> EvalBatch:
        """Dataset indices [start, stop) in their own order, padded to ``rows`` rows with fillers of weight 0.

        A damaged sample is not scored: a filler takes its row, and it is recorded.

        Raises:
            ValueError: the range lies outside the data set, or does not fit into ``rows`` rows of at least one.
            DataError: no healthy sample to fill with.
        """
        if not 0 <= start <= stop <= len(self._dataset) or rows < 1 or stop - start > rows:
            what = f"indices [{start}, {stop}) of a data set of {len(self._dataset)}"
            raise ValueError(f"{what} do not make a batch of {rows} rows")
        bad: list[BadRecord] = []
        samples: list[Any] = []
        weights: list[int] = []
        for index in range(start, stop):
            try:
                samples.append(self._dataset[index])
                weights.append(1)
            except BadSample as error:
                bad.append(BadRecord(index, index, 0, error.key, error.cause))
                samples.append(self._filler())
                weights.append(0)
        while len(samples) < rows:
            samples.append(self._filler())
            weights.append(0)
        batch = self._collate(samples, weights)
        batch.ids = [start + row for row, weight in enumerate(weights) if weight]
        choices = [
            len(getattr(sample, "choices", ())) if weight else 0
            for sample, weight in zip(samples, weights, strict=True)
        ]
        return EvalBatch(batch, choices, bad)

    def _healthy(self, position: int, index: int, bad: list[BadRecord]) -> tuple[int, Any]:
        """(dataset index, sample) for a position: ``index``, which is in order, or its first healthy substitute."""
        for attempt in range(1 + TRIES):
            if attempt:
                index = self._order.substitute(position, attempt)
            try:
                return index, self._dataset[index]
            except BadSample as error:
                bad.append(BadRecord(position, index, attempt, error.key, error.cause))
                last = error
        raise DataError(
            str(last.key),
            f"damaged ({last.cause}), and so were all samples tried for position {position} ({1 + TRIES} in all)",
            "check the shards; most of this data set seems unreadable",
        ) from last

    def _filler(self) -> Any:
        # Its content never counts, so one healthy sample serves for good. Damage met here is not recorded:
        # nothing was consumed.
        if self._filler_sample is None:
            self._filler_sample = self._healthy(0, self._order.substitute(0, 0), [])[1]
        return self._filler_sample
