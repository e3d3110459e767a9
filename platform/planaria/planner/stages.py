"""Where a model is cut into pipeline stages, so that the slowest one is as fast as can be. Pure.

Costs know what is frozen: a frozen unit needs no gradient of its weights, and none of its input either as long as
nothing before it trains. A vision tower that does not train costs a third of what its layers suggest, and stages of
equal numbers of layers leave its rank idle (Cornstarch, arXiv:2503.11367).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class Unit:
    """Something that a stage holds whole."""

    forward: float
    """Time of a forward pass, in any unit."""
    trains: bool = True
    """Whether its weights get a gradient."""
    backward: float | None = None
    """Measured time of its backward pass as it is trained; None: modelled from the forward pass."""


def costs(units: Sequence[Unit]) -> list[float]:
    """Time of forward and backward pass of every unit, in the order in which they run.

    The gradient of the input and that of the weights take about as long as the forward pass each.
    """
    found = []
    needed = False  # whether something before this unit waits for a gradient
    for unit in units:
        modelled = unit.forward * ((1.0 if needed else 0.0) + (1.0 if unit.trains else 0.0))
        found.append(unit.forward + (modelled if unit.backward is None else unit.backward))
        needed = needed or unit.trains
    return found


def cut(cost: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Contiguous cuts that minimise the most expensive stage; every stage gets at least one unit.

    Args:
        cost: of the units, in order.
        stages: how many.
        first: cost that the first stage has besides.
        last: cost that the last stage has besides.

    Returns:
        ``stages + 1`` bounds: stage ``s`` holds the units ``bounds[s]`` to ``bounds[s + 1] - 1``. Of equally good
        cuts the one whose earlier stages hold less.

    Raises:
        ValueError: fewer units than stages, or none of either.
    """
    count = len(cost)
    if not 1 <= stages <= count:
        raise ValueError(f"{count} units cannot be cut into {stages} stages")
    sums = [0.0, *accumulate(cost)]

    def load(stage: int, begin: int, end: int) -> float:
        return sums[end] - sums[begin] + (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)

    # best[s][i]: the most expensive of the stages s.. where these hold the units i..; O(stages * units^2).
    best = [[float("inf")] * (count + 1) for _ in range(stages)]
    for begin in range(count):
        best[stages - 1][begin] = load(stages - 1, begin, count)
    for stage in range(stages - 2, -1, -1):
        for begin in range(count):
            left = stages - 1 - stage
            best[stage][begin] = min(
                (max(load(stage, begin, end), best[stage + 1][end]) for end in range(begin + 1, count - left + 1)),
                default=float("inf"),
            )
    bounds = [0]
    for stage in range(stages - 1):
        begin = bounds[-1]
        # What no later stage must exceed, to rounding; less would not make the step faster.
        goal = best[0][0] * (1 + 1e-9)
        bounds.append(
            next(
                end
                for end in range(begin + 1, count)
                if load(stage, begin, end) <= goal and best[stage + 1][end] <= goal
            )
        )
    return (*bounds, count)


def equal(units: int, stages: int) -> tuple[int, ...]:
    """Bounds of stages of equal numbers of units, as far as they divide."""
    return tuple(units * stage // stages for stage in range(stages + 1))


def slowest(cost: Sequence[float], bounds: Sequence[int], first: float = 0.0, last: float = 0.0) -> float:
    """Cost of the most expensive stage."""
    loads = [sum(cost[begin:end]) for begin, end in pairwise(bounds)]
    loads[0] += first
    loads[-1] += last
    return max(loads)
