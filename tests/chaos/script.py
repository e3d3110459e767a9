"""A fault script: which faults, in which order, after which pauses. A pure function of the seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.chaos.fault import Fault
from tests.chaos.node_faults import NodeReturns
from tests.chaos.world import World

LONGEST_PAUSE_S = 2.0
"""Pauses are uniform, so that faults meet the job at any moment of its steps, and before it has settled."""
FEW_NODES = 2
"""With so few nodes left, one returns next more often than not: else most faults would meet a single worker."""


@dataclass(frozen=True)
class Act:
    """One line of a script."""

    pause_s: float
    """Seconds of training before it."""
    fault: Fault

    def __str__(self) -> str:
        return f"after {self.pause_s:.2f} s: {self.fault}"


def write_script(seed: int, count: int, kinds: Sequence[type[Fault]]) -> list[Act]:
    """``count`` faults. Every kind that can happen comes at least once if there is room for all.

    Raises:
        ValueError: none of the kinds can happen.
    """
    dice, world = random.Random(seed), World.fresh()
    unused = list(kinds)
    dice.shuffle(unused)
    acts = []
    while len(acts) < count:
        possible = [kind for kind in kinds if kind.possible(world)]
        if not possible:
            raise ValueError(f"after {len(acts)} faults none of {[kind.__name__ for kind in kinds]} can happen")
        fresh = [kind for kind in unused if kind in possible]
        if NodeReturns in possible and len(world.nodes) <= FEW_NODES and dice.random() < 0.6:
            chosen: type[Fault] = NodeReturns
        elif fresh and dice.random() < 0.7:
            chosen = fresh[0]
        else:
            chosen = dice.choices(possible, [kind.weight for kind in possible])[0]
        if chosen in unused:
            unused.remove(chosen)
        acts.append(Act(round(dice.uniform(0.0, LONGEST_PAUSE_S), 2), chosen.draw(dice, world)))
    return acts
