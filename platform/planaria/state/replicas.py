"""Replicas of one box must agree to the bit: which of them does not. Pure.

Data-parallel replicas apply the same sums of gradients to the same numbers, so a difference has no lawful cause: a bit
flipped in memory, a processor or a link that miscalculates, or a kernel that wrote where it should not have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ROOT = "(root)"
"""Name of the group of all that lies outside the units."""


@dataclass(frozen=True)
class Difference:
    """A group of tensors that is not the same on all replicas."""

    group: str
    odd: tuple[int, ...]
    """Ranks that differ from the majority; none where there is no majority, as of two replicas."""
    digests: tuple[str, ...]
    """Of each replica, in the order of :attr:`Comparison.ranks`."""


@dataclass(frozen=True)
class Comparison:
    """What one group of replicas found."""

    ranks: tuple[int, ...]
    """Who was compared; nobody where nothing is replicated."""
    groups: int
    """Groups of tensors compared."""
    differ: tuple[Difference, ...]


def group_of(name: str, units: Iterable[str]) -> str:
    """The group that tensor ``name`` is digested with: its unit, or :data:`ROOT`."""
    return next((unit for unit in units if name.startswith(f"{unit}.")), ROOT)


def odd_out(ranks: Sequence[int], digests: Sequence[int]) -> tuple[int, ...]:
    """Ranks whose digest is not that of more than half of them; none where no digest is, or where all agree."""
    value, count = Counter(digests).most_common(1)[0]
    if 2 * count <= len(ranks):
        return ()
    return tuple(rank for rank, digest in zip(ranks, digests, strict=True) if digest != value)


def compared(ranks: Sequence[int], groups: Sequence[str], digests: Sequence[Sequence[int]]) -> Comparison:
    """The outcome, of ``digests`` by rank and group."""
    differ = []
    for at, group in enumerate(groups):
        column = [row[at] for row in digests]
        if len(set(column)) > 1:
            shown = tuple(f"{digest % (1 << 64):016x}" for digest in column)
            differ.append(Difference(group, odd_out(ranks, column), shown))
    return Comparison(tuple(ranks), len(groups), tuple(differ))
