"""Numerical faults: steps whose gradients are not finite."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planaria.control.policies.decisions import GiveUp


@dataclass(frozen=True)
class Proceed:
    """Go on."""

    in_a_row: int
    """Steps skipped in a row up to the newest."""


@dataclass(frozen=True)
class RollBack:
    """Go back to the state of ``to_step`` and leave the data of steps ``first`` to ``last`` out."""

    to_step: int
    """Steps done in that state."""
    first: int
    last: int
    """Both included, 0-based, as they were numbered in the generation that skipped them."""


def judge_steps(
    skipped: Iterable[int], done: int, limit: int, states: Iterable[int], before: Sequence[RollBack] = ()
) -> Proceed | RollBack | GiveUp:
    """What to do after a step that was skipped on all ranks, since its loss or gradient was not finite.

    One such step is nothing: it is skipped, and mixed precision makes some. ``limit`` of them in a row mean that the
    weights are damaged or that the data is poison there, so training goes back to a state from before the first of
    them and leaves their data out. If the same state leads there a second time, with other data, it is the state
    that is bad (or the learning rate, or the model), and going back again cannot help.

    Args:
        skipped: 0-based steps whose update was skipped, of the steps that led to the present state.
        done: steps done; the newest is ``done - 1``.
        limit: steps in a row, at least 1.
        states: numbers of steps done in the states that could be gone back to.
        before: earlier roll-backs of this job, oldest first.

    Raises:
        ValueError: ``limit`` is below 1.
    """
    if limit < 1:
        raise ValueError(f"limit={limit} must be at least 1")
    known = set(skipped)
    first = done
    while first - 1 in known:
        first -= 1
    count = done - first
    if count < limit:
        return Proceed(count)
    last = done - 1
    span = f"steps {first} to {last}" if count > 1 else f"step {first}"
    target = max((state for state in states if state <= first), default=None)
    if target is None:
        return GiveUp(
            f"the gradients of {span} were not finite, and there is no state from before them to go back to; lower "
            "optim.lr, set optim.clip_norm, use train.precision=fp32, or start from other weights"
        )
    again = next((earlier for earlier in before if earlier.to_step == target), None)
    if again is not None:
        return GiveUp(
            f"the gradients of {span} were not finite, although the job had gone back to step {target} before and left "
            f"out the data of steps {again.first} to {again.last}: not the data, but that state, the learning rate or "
            "the model is at fault; lower optim.lr, set optim.clip_norm, or go on from an older checkpoint"
        )
    return RollBack(target, first, last)
