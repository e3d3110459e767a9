"""In which order each rank of a pipeline works through its micro-batches. Pure.

A model is cut into ``pp * virtual`` stages; stage ``s`` lives on pipeline rank ``s % pp``. The same lists are executed
by the engine (:mod:`planaria.engine.pipeline`) and timed by the simulator (:mod:`planaria.planner.bubble`).

* ``gpipe``: all forward passes, then all backward passes (Huang et al., arXiv:1811.06965).
* ``1f1b``: as soon as it can, a rank alternates between them, so that it keeps the activations of at most ``pp``
  micro-batches (PipeDream-flush, Narayanan et al., arXiv:2006.09503).
* ``interleaved``: 1F1B over several stages per rank: a smaller bubble for more messages (arXiv:2104.04473).
* ``zero_bubble``: the backward pass is split into the gradient of the input, for which the stage before waits, and
  that of the weights, for which nobody does, and which fills the gaps (ZB-H1, Qi et al., arXiv:2401.10241).

Interleaved orders are their authors' where ``pp`` divides the number of micro-batches. Elsewhere, and for the last,
list scheduling with unit times under the same limit on activations makes them, so that they exist for any number of
micro-batches: after a fault that number is what the new layout makes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


class Kind(StrEnum):
    """What is done with one micro-batch on one stage."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward pass."""
    INPUT = "I"
    """Its first half: the gradient of the stage's input."""
    WEIGHT = "W"
    """Its second half: the gradients of the weights."""


@dataclass(frozen=True)
class Action:
    """One piece of work."""

    kind: Kind
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.micro}"


Order = tuple[Action, ...]
"""What one rank does, in this order."""


@lru_cache(64)
def orders(schedule: str, pp: int, virtual: int, micros: int) -> tuple[Order, ...]:
    """What every pipeline rank does in one step of ``micros`` micro-batches.

    Raises:
        ValueError: no such schedule, a degree below 1, or several stages per rank where the schedule has one.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"no pipeline schedule {schedule!r}; schedules are {', '.join(SCHEDULES)}")
    if min(pp, virtual, micros) < 1:
        raise ValueError(f"pp={pp}, virtual stages {virtual}, micro-batches {micros}: each must be at least 1")
    if virtual > 1 and schedule in ("gpipe", "1f1b"):
        raise ValueError(f"{schedule} has one stage per rank, not {virtual}; use interleaved or zero_bubble")
    if schedule == "gpipe":
        return tuple(_gpipe(rank, micros) for rank in range(pp))
    if schedule == "1f1b":
        return tuple(_one_forward_one_backward(rank, pp, micros) for rank in range(pp))
    if schedule == "interleaved" and micros % pp == 0:
        return tuple(_interleaved(rank, pp, virtual, micros) for rank in range(pp))
    return _list_schedule(pp, virtual, micros, split=schedule == "zero_bubble")


def _gpipe(rank: int, micros: int) -> Order:
    return tuple(Action(kind, rank, micro) for kind in (Kind.FORWARD, Kind.BACKWARD) for micro in range(micros))


def _one_forward_one_backward(rank: int, pp: int, micros: int) -> Order:
    ahead = min(pp - 1 - rank, micros)
    order = [Action(Kind.FORWARD, rank, micro) for micro in range(ahead)]
    for micro in range(micros):
        if ahead + micro < micros:
            order.append(Action(Kind.FORWARD, rank, ahead + micro))
        order.append(Action(Kind.BACKWARD, rank, micro))
    return tuple(order)


def _interleaved(rank: int, pp: int, virtual: int, micros: int) -> Order:
    forward = [Action(Kind.FORWARD, *place) for place in _passes(rank, pp, virtual, micros, backward=False)]
    backward = [Action(Kind.BACKWARD, *place) for place in _passes(rank, pp, virtual, micros, backward=True)]
    ahead = min(most_in_flight(pp, virtual, rank) - 1, len(forward))
    steady = [action for pair in zip(forward[ahead:], backward, strict=False) for action in pair]
    return (*forward[:ahead], *steady, *backward[len(forward) - ahead :])


def most_in_flight(pp: int, virtual: int, rank: int) -> int:
    """Micro-batches (times stages) whose activations a rank may keep: 1F1B's limit, or Megatron's interleaved one."""
    return pp - rank if virtual == 1 else 2 * (pp - 1 - rank) + (virtual - 1) * pp + 1


def _passes(rank: int, pp: int, virtual: int, micros: int, *, backward: bool) -> Iterator[tuple[int, int]]:
    """(stage, micro-batch) in the order of one rank: groups of ``pp`` micro-batches go through one stage at a time."""
    chunks = range(virtual - 1, -1, -1) if backward else range(virtual)
    for start in range(0, micros, pp):
        for chunk in chunks:
            for micro in range(start, min(start + pp, micros)):
                yield chunk * pp + rank, micro


def _list_schedule(pp: int, virtual: int, micros: int, *, split: bool) -> tuple[Order, ...]:
    """Whoever is free first takes, of what is ready, a backward pass before a forward pass before weights."""
    last = pp * virtual - 1
    gradient = Kind.INPUT if split else Kind.BACKWARD
    length = {Kind.FORWARD: 1, Kind.INPUT: 1, Kind.WEIGHT: 1, Kind.BACKWARD: 2}
    forward = [list(_passes(rank, pp, virtual, micros, backward=False)) for rank in range(pp)]
    backward = [list(_passes(rank, pp, virtual, micros, backward=True)) for rank in range(pp)]
    weights: list[list[tuple[int, int]]] = [[] for _ in range(pp)]
    limits = [most_in_flight(pp, virtual, rank) for rank in range(pp)]
    done: list[list[Action]] = [[] for _ in range(pp)]
    counts = [dict.fromkeys(Kind, 0) for _ in range(pp)]
    ends: dict[Action, int] = {}
    free = [0] * pp

    def ready(action: Action) -> int | None:
        """When what it needs from the neighbouring stage is there; None if that is not known yet."""
        kind, stage, micro = action.kind, action.stage, action.micro
        if kind is Kind.FORWARD:
            return 0 if stage == 0 else ends.get(Action(Kind.FORWARD, stage - 1, micro))
        own = ends.get(Action(Kind.FORWARD, stage, micro))
        if own is None or stage == last:
            return own
        return ends.get(Action(gradient, stage + 1, micro))

    def candidates(rank: int) -> Iterator[tuple[int, int, Action]]:
        """(start, priority, action) of what the rank could do next."""
        count = counts[rank]
        kept = count[Kind.FORWARD] - count[gradient]
        full = split and count[Kind.FORWARD] - count[Kind.WEIGHT] >= limits[0]
        if backward[rank]:
            action = Action(gradient, *backward[rank][0])
            if (when := ready(action)) is not None:
                yield max(when, free[rank]), 0, action
        if forward[rank] and kept < limits[rank] and not full:
            action = Action(Kind.FORWARD, *forward[rank][0])
            if (when := ready(action)) is not None:
                yield max(when, free[rank]), 1, action
        if weights[rank]:
            yield free[rank], 2, Action(Kind.WEIGHT, *weights[rank][0])

    while any(forward) or any(backward) or any(weights):
        start, _, rank, action = min(
            ((start, priority, rank, action) for rank in range(pp) for start, priority, action in candidates(rank)),
            key=lambda choice: choice[:3],
        )
        done[rank].append(action)
        counts[rank][action.kind] += 1
        ends[action] = free[rank] = start + length[action.kind]
        queue = {Kind.FORWARD: forward, Kind.WEIGHT: weights}.get(action.kind, backward)[rank]
        queue.pop(0)
        if action.kind is Kind.INPUT:
            weights[rank].append((action.stage, action.micro))
    return tuple(map(tuple, done))
