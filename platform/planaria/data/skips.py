"""Windows of the data that training leaves out: which batch a step consumes. Pure.

Batches are numbered as an undisturbed run would consume them: batch k is positions [k * B, (k + 1) * B) of the global
order, and without windows step t consumes batch t. A window is a pair (first, last) of batches that are left out, both
included. Step t then consumes the batch that is number t, from 0, of those which are left. So no sample of a
window is consumed, every other one as often as before, and ranks, loaders and layouts appear nowhere.

Windows name batches, not steps, so that they mean the same in whatever order they were added. They come from the
controller with every order, and are written into the meta data of each checkpoint: a state does not hold them, since
the decision to leave a window out is made after the state was that training goes back to.
"""

from __future__ import annotations

from collections.abc import Iterable

Windows = tuple[tuple[int, int], ...]
"""Pairs (first batch, last batch)."""


def normalised(windows: Iterable[tuple[int, int]]) -> Windows:
    """The same batches as disjoint windows in order, with a gap between any two.

    Raises:
        ValueError: a window is negative or runs backwards.
    """
    merged: list[tuple[int, int]] = []
    for first, last in sorted(windows):
        if not 0 <= first <= last:
            raise ValueError(f"batches {first} to {last} are not a window; expected 0 <= first <= last")
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return tuple(merged)


def batch_of(step: int, windows: Iterable[tuple[int, int]]) -> int:
    """Number of the batch that 0-based ``step`` consumes.

    Raises:
        ValueError: the step is negative, or a window is none.
    """
    if step < 0:
        raise ValueError(f"step {step} is negative")
    batch = step
    for first, last in normalised(windows):
        if batch < first:
            break
        batch += last - first + 1
    return batch


def without_steps(windows: Iterable[tuple[int, int]], first: int, last: int) -> Windows:
    """``windows``, and what steps ``first`` to ``last`` consume under them: a second window, after a first one, is seen
    in steps that are shifted already.

    Raises:
        ValueError: the steps are negative or run backwards.
    """
    known = tuple(windows)
    if first > last:
        raise ValueError(f"steps {first} to {last} run backwards")
    return normalised((*known, (batch_of(first, known), batch_of(last, known))))


def same_past(step: int, before: Iterable[tuple[int, int]], now: Iterable[tuple[int, int]]) -> bool:
    """Whether a state of ``step`` steps done under ``before`` is one that ``now`` leads to: all its steps consumed the
    same batches. One that did not belongs to a past that was given up, and training must not go on from it."""
    if step == 0:
        return True
    end = batch_of(step - 1, before)
    if end != batch_of(step - 1, now):
        return False
    return _up_to(end, before) == _up_to(end, now)


def _up_to(batch: int, windows: Iterable[tuple[int, int]]) -> Windows:
    return tuple((first, min(last, batch)) for first, last in normalised(windows) if first <= batch)
