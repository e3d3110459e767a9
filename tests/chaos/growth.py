"""Whether the processes that lived through the faults hold more at the end than at the start."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.support.footprint import Footprint, footprint

WARM_UP = 2
"""Generations after which a process has met everything once: what it holds then is the start."""
MOST = {"anonymous": 32 << 20, "descriptors": 30, "sockets": 15, "threads": 12}
"""Growth that is none: full caches, pages that allocators keep, connections and event loops that Ray keeps for a
while after their peer has died. It does not grow with the number of faults, as any leak does in a long run."""


@dataclass
class _Span:
    """First and last look at a process in one layout: groups of another layout have other connections."""

    layout: str
    begin: int
    """Generation of the first look."""
    start: Footprint
    end_generation: int
    end: Footprint


@dataclass
class _Life:
    role: str
    generations: set[int] = field(default_factory=set)
    spans: dict[str, _Span] = field(default_factory=dict)

    @property
    def longest(self) -> _Span | None:
        """The span over most generations; None if the process never had one layout in two generations once warm."""
        spans = [span for span in self.spans.values() if span.end_generation > span.begin]
        return max(spans, key=lambda span: span.end_generation - span.begin, default=None)


class Growth:
    """Footprints of processes over generations."""

    def __init__(self) -> None:
        self._lives: dict[int, _Life] = {}

    def sample(self, roles: Mapping[int, str], generation: int, layout: str) -> None:
        """Look at processes while the job trains undisturbed in ``generation``.

        Args:
            roles: what each process is, by its id.
            generation: number of the generation that runs.
            layout: its layout.
        """
        for pid, role in roles.items():
            look = footprint(pid)
            if look is None:
                continue
            life = self._lives.setdefault(pid, _Life(role))
            life.generations.add(generation)
            if len(life.generations) > WARM_UP:
                span = life.spans.setdefault(layout, _Span(layout, generation, look, generation, look))
                span.end_generation, span.end = generation, look

    def table(self) -> str:
        """The figures of every process at the start and at the end of its longest span in one layout."""
        head = f"{'process':<12}{'layout':<26}{'generations':>11}{'memory MiB':>18}"
        lines = [f"{head}{'shared MiB':>14}{'descriptors':>14}{'sockets':>12}{'threads':>12}"]
        for role, span in self._compared():
            a, b = span.start, span.end
            lines.append(
                f"{role:<12}{span.layout:<26}{f'{span.begin}-{span.end_generation}':>11}"
                f"{f'{a.anonymous / 2**20:.1f} -> {b.anonymous / 2**20:.1f}':>18}"
                f"{f'{a.shared / 2**20:.1f} -> {b.shared / 2**20:.1f}':>14}"
                f"{f'{a.descriptors} -> {b.descriptors}':>14}{f'{a.sockets} -> {b.sockets}':>12}"
                f"{f'{a.threads} -> {b.threads}':>12}"
            )
        return "\n".join(lines)

    def grown(self) -> list[str]:
        """What grew beyond :data:`MOST`."""
        found = []
        for role, span in self._compared():
            grown = [f"{name} {getattr(span.start, name)} -> {getattr(span.end, name)}" for name in self._beyond(span)]
            if grown:
                where = f"{role}, generations {span.begin} to {span.end_generation}"
                found.append(f"{where}: {', '.join(grown)} ({span.end.more_than(span.start)})")
        return found

    @staticmethod
    def _beyond(span: _Span) -> list[str]:
        return [name for name, most in MOST.items() if getattr(span.end, name) - getattr(span.start, name) > most]

    def _compared(self) -> list[tuple[str, _Span]]:
        return [(life.role, span) for life in self._lives.values() if (span := life.longest) is not None]


def shared_memory_used() -> int:
    """Bytes in use in /dev/shm, named or nameless."""
    stat = os.statvfs("/dev/shm")
    return (stat.f_blocks - stat.f_bfree) * stat.f_frsize
