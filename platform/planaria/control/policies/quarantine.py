"""Quarantine: nodes that fail again and again, hang the others or compute wrong numbers get no more work for a while.

:class:`planaria.control.nodes.NodeTrust` keeps one :class:`Record` per node; everything here is a function of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

WINDOW_S = 600.0
"""Failures count together within this time."""
SAME_EVENT_S = 3.0
"""Failures within this time are one: with a node all of its processes die at once."""
FIRST_S = 60.0
LONGEST_S = 3600.0
"""Sentences double from the first to the longest."""
REMEMBERED = 32
"""Causes that a record keeps."""


class Fault(StrEnum):
    """What a node is blamed for."""

    FAILURE = "failure"
    """A process on it died or did not come up."""
    HANG = "hang"
    """It stood still while all others waited for it."""
    CHECKSUM = "checksum"
    """Its replica of the state differed from the majority's."""


@dataclass(frozen=True)
class Blame:
    """Something that speaks against a node."""

    at: float
    """Monotonic seconds."""
    fault: Fault
    reason: str
    """For people: which process, which error."""


@dataclass(frozen=True)
class Record:
    """What is held against a node."""

    blames: tuple[Blame, ...] = ()
    """Within the window, oldest first; at most :data:`REMEMBERED`."""
    sentences: int = 0
    """How often it was quarantined, up to now."""
    until: float = float("-inf")
    """End of the newest quarantine."""
    reason: str = ""
    """Why it was quarantined last."""

    def held(self, now: float) -> bool:
        """Whether it is in quarantine."""
        return now < self.until


@dataclass(frozen=True)
class Quarantine:
    """Give the node no more work until then, and take away what it has."""

    node: str
    until: float
    reason: str
    left: int
    """Places on the other nodes."""
    short: bool = False
    """Whether those are fewer than ``min_workers``, so that the job must wait: say so."""


@dataclass(frozen=True)
class Tolerate:
    """The node deserves quarantine, but without it fewer than ``min_workers`` places are left: go on with it, and say
    so."""

    node: str
    reason: str
    left: int


def sentence_s(sentences: int) -> float:
    """Length of the quarantine after ``sentences`` earlier ones, in seconds."""
    return min(LONGEST_S, FIRST_S * 2.0 ** min(sentences, 32))


def note(record: Record, blame: Blame) -> Record:
    """The record with one more blame.

    One that tells of an event that is known, or comes while the node is in quarantine (its processes are being
    ended), changes nothing.
    """
    if record.held(blame.at):
        return record
    kept = tuple(item for item in record.blames if blame.at - item.at < WINDOW_S)
    if any(item.fault is blame.fault and abs(blame.at - item.at) < SAME_EVENT_S for item in kept):
        return replace(record, blames=kept)
    forgiven = record.sentences and blame.at - record.until > LONGEST_S
    return replace(record, blames=(*kept, blame)[-REMEMBERED:], sentences=0 if forgiven else record.sentences)


def charge(record: Record, failures: int, now: float) -> str | None:
    """Why the node deserves quarantine; None if it does not.

    Args:
        record: what is held against it.
        failures: ``elastic.node_failures``: how many within :data:`WINDOW_S` are too many; 0: any number is forgiven.
            A hang or a wrong checksum is one too many.
        now: monotonic seconds.
    """
    recent = _recent(record, now)
    grave = [item for item in recent if item.fault is not Fault.FAILURE]
    if grave:
        return grave[-1].reason
    if 0 < failures <= len(recent):
        reasons = "; ".join(dict.fromkeys(item.reason for item in recent if item.reason))
        return f"{len(recent)} failures within {WINDOW_S:.0f} s ({reasons})"
    return None


def decide(
    node: str, record: Record, failures: int, left: int, min_workers: int, now: float
) -> Quarantine | Tolerate | None:
    """What to do about a node after a blame.

    A node whose numbers are wrong is never tolerated: training on them would go on for nothing.

    Args:
        node: its name.
        record: what is held against it.
        failures: see :func:`charge`.
        left: places on all other nodes that may be used.
        min_workers: ``elastic.min_workers``.
        now: monotonic seconds.
    """
    reason = charge(record, failures, now)
    if reason is None or record.held(now):
        return None
    short = left < min_workers
    wrong = any(item.fault is Fault.CHECKSUM for item in _recent(record, now))
    if short and not wrong:
        return Tolerate(node, reason, left)
    return Quarantine(node, now + sentence_s(record.sentences), reason, left, short)


def carried_out(record: Record, decision: Quarantine) -> Record:
    """The record of a node that was quarantined; what it was for is served with it."""
    return Record((), record.sentences + 1, decision.until, decision.reason)


def inherited(departed: Record, now: float) -> Record | None:
    """What a node that comes back under a new name keeps of its record; None: it starts clean.

    One fault is no pattern, and a new instance at an old address deserves a chance. A machine that failed repeatedly
    keeps its record whatever name it comes under.

    Args:
        departed: of the node that left from the same host.
        now: monotonic seconds.
    """
    served = departed.sentences and now - departed.until <= LONGEST_S
    return departed if served or len(_recent(departed, now)) > 1 else None


def _recent(record: Record, now: float) -> list[Blame]:
    return [item for item in record.blames if now - item.at < WINDOW_S]
