"""All batches of one job, training and held-out, wherever they are built."""

from __future__ import annotations

import threading
from functools import cached_property

from planaria.config import JobConfig
from planaria.data.builder import BatchBuilder, BuiltSlice, EvalBatch
from planaria.data.images import reuse_memory
from planaria.recipe import Recipe


class Batches:
    """Builds any slice of any batch; the data sets are opened when they are first needed. Thread-safe: one at a time.

    Any process with the same recipe and job builds the same batches, be it a loader or a rank.
    """

    def __init__(self, recipe: Recipe, job: JobConfig) -> None:
        self._recipe, self._job = recipe, job
        self._lock = threading.Lock()

    @cached_property
    def _train(self) -> BatchBuilder:
        return self._builder("train")

    @cached_property
    def _val(self) -> BatchBuilder:
        return self._builder("val")

    def _builder(self, split: str) -> BatchBuilder:
        job = self._job
        dataset = self._recipe.dataset(split)
        data, size = job.data, job.train.global_batch
        return BatchBuilder(dataset, self._recipe.collate, job.seed, size, data.shuffle, data.shuffle_block)

    def open(self) -> None:
        """Open the training samples.

        Raises:
            DataError: they cannot be used.
        """
        reuse_memory()
        with self._lock:
            _ = self._train

    def build(self, number: int, lo: int, hi: int, count: int) -> BuiltSlice:
        """Offsets [lo, hi) of batch ``number`` as ``count`` micro-batches; see :meth:`BatchBuilder.build`."""
        with self._lock:
            return self._train.build(number, lo, hi, count)

    def held_out(self, start: int, stop: int, rows: int) -> EvalBatch:
        """Held-out samples [start, stop), padded to ``rows`` rows; see :meth:`BatchBuilder.eval_batch`."""
        with self._lock:
            return self._val.eval_batch(start, stop, rows)

    def held_out_size(self) -> int:
        """How many held-out samples there are."""
        return len(self._recipe.dataset("val"))
