"""The data-loading actor: any loader builds any slice of any step, so losing one loses nothing."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from functools import cached_property

import ray

from planaria.config import JobConfig
from planaria.data.builder import BatchBuilder, BuiltSlice, EvalBatch
from planaria.recipe import Recipe
from planaria.runtime.beacon import Beacon, BeaconAddress
from planaria.runtime.hello import Hello

REMEMBERED = 16
"""Built slices kept, so that the ranks of one tensor-parallel group cost one build."""


class Loader:
    """Body of the Ray actor. CPU only; stateless but for a small cache."""

    def __init__(self, ident: str, beacon: BeaconAddress, recipe: Recipe, job: JobConfig) -> None:
        self._recipe, self._job = recipe, job
        self._built: OrderedDict[tuple[int, int, int, int], BuiltSlice] = OrderedDict()
        self._lock = threading.Lock()
        self._beacon = Beacon(beacon, ident, lease_s=job.elastic.orphan_s)

    @cached_property
    def _train(self) -> BatchBuilder:
        return self._builder("train")

    @cached_property
    def _val(self) -> BatchBuilder:
        return self._builder("val")

    def _builder(self, split: str) -> BatchBuilder:
        job = self._job
        dataset = self._recipe.dataset(split)
        return BatchBuilder(dataset, self._recipe.collate, job.seed, job.train.global_batch, job.data.shuffle)

    def ready(self) -> Hello:
        """Opens the training samples; raises DataError if they cannot be used."""
        with self._lock:
            _ = self._train
        return Hello(os.getpid(), ray.get_runtime_context().get_node_id())

    def adopt(self, beacon: BeaconAddress) -> Hello:
        """Belong to the controller at ``beacon``, which has returned."""
        self._beacon.adopt(beacon)
        return self.ready()

    def build(self, number: int, lo: int, hi: int, count: int) -> BuiltSlice:
        """Offsets [lo, hi) of batch ``number`` as ``count`` micro-batches."""
        key = (number, lo, hi, count)
        with self._lock:
            if key not in self._built:
                self._built[key] = self._train.build(*key)
                while len(self._built) > REMEMBERED:
                    self._built.popitem(last=False)
            return self._built[key]

    def held_out(self, start: int, stop: int, rows: int) -> EvalBatch:
        """Held-out samples [start, stop)."""
        with self._lock:
            return self._val.eval_batch(start, stop, rows)

    def held_out_size(self) -> int:
        """How many held-out samples there are."""
        return len(self._recipe.dataset("val"))
