"""How long a pipeline step takes, and how much of it its ranks wait: an event simulation of the schedules. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from planaria.planner.schedules import Action, Kind, Order


@dataclass(frozen=True)
class Timeline:
    """One simulated step."""

    span: float
    """From the first beginning to the last end."""
    busy: tuple[float, ...]
    """Time that each rank works."""
    starts: Mapping[Action, float]

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they wait."""
        return 1.0 - sum(self.busy) / (self.span * len(self.busy)) if self.span else 0.0


class Deadlock(ValueError):
    """Orders that wait for one another for ever."""


def simulate(orders: Sequence[Order], cost: Callable[[Action], float], message: float = 0.0) -> Timeline:
    """Play the orders of all ranks.

    Args:
        orders: by rank, as :func:`planaria.planner.schedules.orders` makes them.
        cost: how long an action takes.
        message: how long the result of one stage is on its way to a stage of another rank.

    Raises:
        Deadlock: no rank can go on.
    """
    rank_of = {action.stage: rank for rank, order in enumerate(orders) for action in order}
    last = max(rank_of, default=0)
    starts: dict[Action, float] = {}
    ends: dict[Action, float] = {}
    free, busy, at = [0.0] * len(orders), [0.0] * len(orders), [0] * len(orders)

    def needs(action: Action) -> Action | None:
        """What another stage must have done first."""
        if action.kind is Kind.FORWARD:
            return Action(Kind.FORWARD, action.stage - 1, action.micro) if action.stage else None
        if action.kind is Kind.WEIGHT or action.stage == last:
            return None
        return Action(action.kind, action.stage + 1, action.micro)

    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                action = order[at[rank]]
                needed = needs(action)
                begin = free[rank]
                if needed is not None:
                    if needed not in ends:
                        break
                    way = message if rank_of[needed.stage] != rank else 0.0
                    begin = max(begin, ends[needed] + way)
                took = cost(action)
                starts[action], ends[action] = begin, begin + took
                free[rank], busy[rank] = begin + took, busy[rank] + took
                at[rank] += 1
                moved = True
    if stuck := [str(order[at[rank]]) for rank, order in enumerate(orders) if at[rank] < len(order)]:
        raise Deadlock(f"no rank can go on: {', '.join(stuck)} wait for one another")
    return Timeline(max(free, default=0.0), tuple(busy), starts)
