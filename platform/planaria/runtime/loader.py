"""The data-loading actor: any loader builds any slice of any step, so losing one loses nothing."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict

import ray

from planaria.config import JobConfig
from planaria.data.batches import Batches
from planaria.data.builder import BuiltSlice, EvalBatch
from planaria.recipe import Recipe
from planaria.runtime.beacon import Beacon, BeaconAddress
from planaria.runtime.hello import Hello

REMEMBERED = 16
"""Built slices kept, so that the ranks of one tensor-parallel group cost one build."""


class Loader:
    """Body of the Ray actor. CPU only; stateless but for a small cache."""

    def __init__(self, ident: str, beacon: BeaconAddress, recipe: Recipe, job: JobConfig) -> None:
        self._batches = Batches(recipe, job)
        self._built: OrderedDict[tuple[int, int, int, int], BuiltSlice] = OrderedDict()
        self._lock = threading.Lock()
        self._beacon = Beacon(beacon, ident, lease_s=job.elastic.orphan_s)

    def ready(self) -> Hello:
        """Opens the training samples; raises DataError if they cannot be used."""
        self._batches.open()
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
                self._built[key] = self._batches.build(*key)
                while len(self._built) > REMEMBERED:
                    self._built.popitem(last=False)
            return self._built[key]

    def held_out(self, start: int, stop: int, rows: int) -> EvalBatch:
        """Held-out samples [start, stop)."""
        return self._batches.held_out(start, stop, rows)

    def held_out_size(self) -> int:
        """How many held-out samples there are."""
        return self._batches.held_out_size()
