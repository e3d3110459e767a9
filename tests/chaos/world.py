"""The cluster as a fault script sees it while it is being written: which nodes there are. No Ray, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field

NODES = 4
SIZES = (2, 1, 2, 1)
"""CPUs of the nodes at the start; tp=2 needs two on one node."""


@dataclass
class World:
    """Nodes by name with their CPUs. A node that returns has a new name, as it has a new id in Ray."""

    nodes: dict[str, int] = field(default_factory=dict)
    _made: int = 0

    @classmethod
    def fresh(cls) -> World:
        """The cluster at the start."""
        world = cls()
        for cpus in SIZES:
            world.add(cpus)
        return world

    def add(self, cpus: int) -> str:
        """A node appears; returns its name."""
        name = f"n{self._made}"
        self._made += 1
        self.nodes[name] = cpus
        return name

    def remove(self, name: str) -> None:
        """A node is gone."""
        del self.nodes[name]

    @property
    def missing(self) -> int:
        """How many nodes could return."""
        return NODES - len(self.nodes)
