"""An actor that occupies a worker's resources in Ray's books, for a standby that was promoted: Ray cannot give an actor
that runs more than it was started with, and would promise the free place to somebody else.
"""

from __future__ import annotations

import os

import ray

from planaria.runtime.beacon import Beacon, BeaconAddress
from planaria.runtime.hello import Hello


class Seat:
    """Body of the Ray actor."""

    def __init__(self, ident: str, beacon: BeaconAddress, lease_s: float) -> None:
        self._beacon = Beacon(beacon, ident, lease_s=lease_s)

    def ready(self) -> Hello:
        """Who this is."""
        return Hello(os.getpid(), ray.get_runtime_context().get_node_id())

    def adopt(self, beacon: BeaconAddress) -> Hello:
        """Belong to the controller at ``beacon``, which has returned."""
        self._beacon.adopt(beacon)
        return self.ready()
