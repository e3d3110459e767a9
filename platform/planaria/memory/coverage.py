"""Which step the memory of the living nodes covers completely. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from planaria.memory.table import Table


@dataclass(frozen=True, slots=True)
class Holding:
    """One snapshot, or copies of some of its slices, in the memory of one node.

    Attributes:
        node: where it is.
        owner: worker whose snapshot it is.
        replica: whether it is a copy.
        generation, step: the state: so many completed optimizer steps, reached in that generation.
        table: digest of the table that describes it.
        path: where processes of the same node can map it.
    """

    node: str
    owner: str
    replica: bool
    generation: int
    step: int
    table: str
    path: str


def newest_complete(holdings: Iterable[Holding], tables: Mapping[str, Table]) -> list[Holding]:
    """The holdings of the newest state that they cover completely; empty if they cover none.

    Slices of different generations are never mixed: redone steps agree to rounding only.
    """
    states: dict[tuple[int, int], list[Holding]] = {}
    for holding in holdings:
        states.setdefault((holding.step, holding.generation), []).append(holding)
    for key in sorted(states, reverse=True):
        if not missing(tables[holding.table] for holding in states[key]):
            return states[key]
    return []


def missing(tables: Iterable[Table]) -> list[str]:
    """Tensors of which the tables of one state do not hold every element.

    Boxes of one layout are equal or disjoint, so it is enough to count elements.
    """
    tables = list({table.digest: table for table in tables}.values())
    if not tables:
        return []
    held: dict[str, int] = {}
    for name, offset, shape in {(e.tensor, e.box.offset, e.box.shape) for t in tables for e in t.entries}:
        held[name] = held.get(name, 0) + math.prod(shape)
        del offset
    return [name for name, shape in tables[0].expected.items() if held.get(name, 0) < math.prod(shape)]
