"""All kinds of faults, and which of them a script may use."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tests.chaos.fault import Fault
from tests.chaos.node_faults import AllNodesKilled, NodeFlaps, NodeKilled, NodeReturns, NodesKilled
from tests.chaos.other_faults import ControllerKilled, DiskFull, NodeDrained
from tests.chaos.process_faults import (
    KeeperKilled,
    LoaderKilled,
    SlowRank,
    WorkerFrozen,
    WorkerKilled,
    WorkerStutters,
    WorkerTerminated,
)
from tests.chaos.timed_faults import KilledWhileForming, KilledWhileResizing, KilledWhileRestoring, KilledWhileSaving

KINDS: tuple[type[Fault], ...] = (
    NodeKilled,
    NodesKilled,
    AllNodesKilled,
    NodeReturns,
    NodeFlaps,
    WorkerKilled,
    WorkerTerminated,
    WorkerFrozen,
    WorkerStutters,
    SlowRank,
    LoaderKilled,
    KeeperKilled,
    KilledWhileForming,
    KilledWhileRestoring,
    KilledWhileResizing,
    KilledWhileSaving,
    DiskFull,
    ControllerKilled,
    NodeDrained,
)

CRASHES = frozenset(kind.kind for kind in (NodeKilled, NodesKilled, WorkerKilled, KeeperKilled, KilledWhileSaving))
"""Kinds whose recovery times are those of a crash: found at once, one recovery, nobody waited for."""


def choose(only: Collection[str], left_out: Mapping[str, str]) -> tuple[list[type[Fault]], dict[str, str]]:
    """(kinds that a script may use, why each other kind is not used).

    Args:
        only: class names or names of the kinds that are wanted, also unsupported ones; empty: all that are supported.
        left_out: kinds that this machine cannot do, with the reason.

    Raises:
        ValueError: a name in ``only`` is no kind.
    """
    unknown = set(only) - {kind.kind for kind in KINDS} - {kind.__name__ for kind in KINDS}
    if unknown:
        raise ValueError(f"no such kinds: {sorted(unknown)}; there are {[kind.__name__ for kind in KINDS]}")
    reasons: dict[str, str] = {}
    for kind in KINDS:
        if only and not {kind.kind, kind.__name__} & set(only):
            reasons[kind.kind] = "not asked for"
        elif kind.kind in left_out:
            reasons[kind.kind] = left_out[kind.kind]
        elif kind.unsupported and not only:
            reasons[kind.kind] = kind.unsupported
    return [kind for kind in KINDS if kind.kind not in reasons], reasons
