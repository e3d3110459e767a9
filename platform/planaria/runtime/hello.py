"""What a process says of itself when the controller meets it: at its start, and when a controller returns."""

from __future__ import annotations

from dataclasses import dataclass

from planaria.memory.wire import KeeperAddress


@dataclass(frozen=True)
class Hello:
    """Plain values that travel from a process to the controller."""

    pid: int
    node: str
    """Ray's id of the node on which it really runs: Ray may have put a loader elsewhere than asked."""
    address: KeeperAddress | None = None
    """Where it listens, if it is a keeper."""
    generation: int = 0
    """The newest generation that it was ordered to play, if it is a worker."""
    gpus: str = ""
    """The devices that Ray gave it, as ``CUDA_VISIBLE_DEVICES`` names them."""
