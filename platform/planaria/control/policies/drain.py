"""Planned leave: when to go from nodes that have been told to end.

A notice (a Ray drain, SIGTERM from Kubernetes, a spot warning) often comes for several nodes within seconds. Each
change of size costs, so notices are gathered for a moment, as far as the deadlines allow, and obeyed in one move.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from planaria.config import ElasticConfig
from planaria.control.policies.decisions import Pause

GATHER_S = 2.0
"""Longest wait for further notices after the first."""
MARGIN_S = 1.0
"""What leaving takes beside the step that is under way: the request's way, the snapshot."""
SLOW_STEP = 1.5
"""A step may take this many times the longest recent one."""


@dataclass(frozen=True)
class Notice:
    """A node is going to end."""

    deadline: float | None
    """Monotonic seconds; None if nobody said when."""
    reason: str = ""
    """For people, e.g. ``preempted``."""
    since: float = 0.0
    """When the notice came; monotonic seconds."""


@dataclass(frozen=True)
class Stay:
    """Go on training; ask again at ``until`` (monotonic seconds) at the latest, or when another notice comes."""

    until: float | None = None
    """None: nothing is pending."""


@dataclass(frozen=True)
class Leave:
    """Go on without these nodes from the next step boundary on."""

    nodes: tuple[str, ...]
    members: tuple[str, ...]
    """Workers on them that hold a rank."""
    left: int
    """Workers that can go on, spares that step in included, up to the job's maximum."""
    why: str
    late: tuple[str, ...] = ()
    """Of the nodes, those whose deadline probably comes before the next boundary: be ready to recover instead."""


def drain(
    notices: Mapping[str, Notice],
    running: Mapping[str, Sequence[str]],
    spares: Mapping[str, Sequence[str]],
    step_s: Iterable[float],
    now: float,
    config: ElasticConfig,
    save_s: float = 0.0,
) -> Stay | Leave | Pause:
    """What to do about the notices.

    * All nodes under notice that carry ranks leave together: :data:`GATHER_S` after the first notice, or as soon as
      one of them could miss its deadline otherwise.
    * If that would leave fewer than ``min_workers``, only those leave whose time has come; the others are used to
      the end, since new nodes may come meanwhile.
    * If the urgent ones alone would leave too few, the job pauses, with time enough to save its state.

    A node without ranks needs no move: it only must not get any. A notice that was taken back is left out of
    ``notices`` by the caller.

    Args:
        notices: by node.
        running: members that hold a rank, by node.
        spares: ready workers without a rank, by node.
        step_s: recent step times, in seconds; none are known before the first step, and then there is no waiting.
        now: monotonic seconds.
        config: limits.
        save_s: seconds that a checkpoint in durable storage takes.
    """
    leaving = {node: notice for node, notice in sorted(notices.items()) if running.get(node)}
    if not leaving:
        return Stay()
    step = max(step_s, default=None)
    gathered = min(notice.since for notice in leaving.values()) + GATHER_S
    # Last moments at which to ask for the boundary: the step under way may just have begun.
    ample = 0.0 if step is None else SLOW_STEP * step + MARGIN_S
    last = {node: _last_moment(notice, ample, gathered, step is None) for node, notice in leaving.items()}

    left = _left(leaving, notices, running, spares, config)
    if left >= config.min_workers:
        due = min(gathered, *last.values())
        if now < due:
            return Stay(due)
        return _leave(leaving, leaving, running, left, now, step or 0.0)

    last = {node: moment - save_s for node, moment in last.items()}
    urgent = {node: notice for node, notice in leaving.items() if now >= last[node]}
    if not urgent:
        return Stay(min(last.values()))
    left = _left(urgent, notices, running, spares, config)
    if left >= config.min_workers:
        return _leave(urgent, leaving, running, left, now, step or 0.0)
    return Pause(left, tuple(leaving), _members(leaving, running))


def _last_moment(notice: Notice, ample: float, gathered: float, blind: bool) -> float:
    if blind:
        return notice.since
    return gathered if notice.deadline is None else notice.deadline - ample


def _left(
    leaving: Mapping[str, Notice],
    notices: Mapping[str, Notice],
    running: Mapping[str, Sequence[str]],
    spares: Mapping[str, Sequence[str]],
    config: ElasticConfig,
) -> int:
    """Workers that can go on without ``leaving``; spares under notice are no replacement."""
    stay = sum(len(members) for node, members in running.items() if node not in leaving)
    fresh = sum(len(members) for node, members in spares.items() if node not in notices)
    return min(stay + fresh, config.max_workers)


def _members(nodes: Iterable[str], running: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    return tuple(member for node in nodes for member in running[node])


def _leave(
    going: Mapping[str, Notice],
    noticed: Mapping[str, Notice],
    running: Mapping[str, Sequence[str]],
    left: int,
    now: float,
    step: float,
) -> Leave:
    reasons = ", ".join(dict.fromkeys(notice.reason for notice in going.values() if notice.reason))
    kept = len(noticed) - len(going)
    why = f"{len(going)} node(s) told to end" + (f" ({reasons})" if reasons else "")
    why += f"; {kept} more stay until their deadline, since too few workers would be left" if kept else ""
    late = [n for n, notice in going.items() if notice.deadline is not None and notice.deadline < now + step]
    return Leave(tuple(going), _members(going, running), left, why, tuple(late))
