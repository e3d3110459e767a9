"""Whether the processes that lived through the faults hold more at the end than at the start."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from tests.support.footprint import Footprint, footprint

WARM_UP = 2
"""Generations after which a process has met everything once: what it holds then is the start."""
MOST = {"anonymous": 48 << 20, "descriptors": 24, "sockets": 24, "threads": 16}
"""Growth that is none: caches that fill, connections to more peers than at the start, allocators that keep pages.
It does not depend on the number of faults."""


@dataclass
class _Life:
    role: str
    seen: int = 0
    generations: set[int] = field(default_factory=set)
    start: Footprint | None = None
    start_generation: int = 0
    end: Footprint | None = None
    end_generation: int = 0


class Growth:
    """First and last footprint of every process, by pid."""

    def __init__(self) -> None:
        self._lives: dict[int, _Life] = {}

    def sample(self, roles: dict[int, str], generation: int) -> None:
        """Look at processes while the job trains undisturbed in ``generation``."""
        for pid, role in roles.items():
            look = footprint(pid)
            if look is None:
                continue
            life = self._lives.setdefault(pid, _Life(role))
            life.generations.add(generation)
            if len(life.generations) > WARM_UP:
                if life.start is None:
                    life.start, life.start_generation = look, generation
                life.end, life.end_generation = look, generation

    def table(self) -> str:
        """Every process that lived through more than one generation once warm, with its figures."""
        lines = [
            f"{'process':<14}{'generations':>13}{'memory MiB':>18}{'descriptors':>14}{'sockets':>12}{'threads':>12}"
        ]
        for life in self._compared():
            assert life.start is not None and life.end is not None
            a, b = life.start, life.end
            lines.append(
                f"{life.role:<14}{f'{life.start_generation}-{life.end_generation}':>13}"
                f"{f'{a.anonymous / 2**20:.1f} -> {b.anonymous / 2**20:.1f}':>18}"
                f"{f'{a.descriptors} -> {b.descriptors}':>14}{f'{a.sockets} -> {b.sockets}':>12}"
                f"{f'{a.threads} -> {b.threads}':>12}"
            )
        return "\n".join(lines)

    def grown(self) -> list[str]:
        """What grew beyond :data:`MOST`."""
        found = []
        for life in self._compared():
            assert life.start is not None and life.end is not None
            for name, most in MOST.items():
                before, after = getattr(life.start, name), getattr(life.end, name)
                if after - before > most:
                    found.append(f"{life.role}: {name} grew from {before:,} to {after:,}")
        return found

    def _compared(self) -> list[_Life]:
        return [life for life in self._lives.values() if life.start is not None and life.start is not life.end]


def shared_memory_used() -> int:
    """Bytes in use in /dev/shm, named or nameless."""
    stat = os.statvfs("/dev/shm")
    return (stat.f_blocks - stat.f_bfree) * stat.f_frsize
