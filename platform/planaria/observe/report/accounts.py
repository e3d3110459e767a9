"""The account of wall time of a whole run: the sum over its submissions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from planaria.observe.goodput import CLASSES

ROUNDING_S = 0.01
"""By how much the sum of rounded classes may be off."""


def total(accounts: Sequence[Mapping[str, Any]], starts: Sequence[float]) -> dict[str, float] | None:
    """Seconds by class, ``wall`` and ``goodput``: the newest row of every submission, added up; None if there is none.

    Args:
        accounts: rows in the order in which they were written; one without ``time`` is the newest submission's.
        starts: when each submission began.
    """
    newest: list[tuple[int, Mapping[str, Any]]] = []
    for row in accounts:
        attempt = bisect_right(starts, row["time"]) if "time" in row else len(starts)
        # An account that shrinks has begun anew: a controller came back without its old one.
        if newest and newest[-1][0] == attempt and row["wall"] >= newest[-1][1]["wall"] - ROUNDING_S:
            newest.pop()
        newest.append((attempt, row))
    if not newest:
        return None
    summed = {name: sum(float(row.get(name) or 0.0) for _, row in newest) for name in CLASSES}
    wall = sum(summed.values())
    return summed | {"wall": wall, "goodput": summed["productive"] / wall if wall else 0.0}


def lost_s(account: Mapping[str, float]) -> float:
    """Seconds that were not productive, the step that is under way left aside."""
    return max(0.0, account["wall"] - account["productive"] - account.get("under_way", 0.0))
