"""Numerical faults: steps whose gradients are not finite, and replicas that disagree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from planaria.control.policies.decisions import GiveUp

# Steps that were skipped


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


# Replicas


@dataclass(frozen=True)
class Agreed:
    """All replicas that answered are the same."""


@dataclass(frozen=True)
class Odd:
    """A minority differs from more than half of the replicas."""

    ranks: tuple[int, ...]
    digest: str
    """The majority's."""


@dataclass(frozen=True)
class Undecided:
    """Replicas differ and no digest has a majority: somebody is wrong, and nobody can say who."""

    groups: tuple[tuple[int, ...], ...]
    """Ranks with the same digest, largest group first."""


def vote(digests: Mapping[int, str | None]) -> Agreed | Odd | Undecided:
    """Which data-parallel replicas of one part of the state are wrong.

    Args:
        digests: by rank; None from a rank that did not answer. It has no vote, but the majority is one of all
            ranks, so that few answers condemn nobody.
    """
    answered = {rank: digest for rank, digest in sorted(digests.items()) if digest is not None}
    counts = Counter(answered.values())
    if len(counts) <= 1:
        return Agreed()
    digest, votes = counts.most_common(1)[0]
    if 2 * votes > len(digests):
        return Odd(tuple(rank for rank, found in answered.items() if found != digest), digest)
    groups = [tuple(rank for rank, found in answered.items() if found == each) for each in counts]
    return Undecided(tuple(sorted(groups, key=lambda group: (-len(group), group))))
