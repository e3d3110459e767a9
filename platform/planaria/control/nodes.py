"""Which nodes new workers may be started on: pure bookkeeping of trust.

Ray needs ten seconds and more to notice that a node is dead, and would keep a worker that is started there
pending until then. A node that lost a worker is therefore *rested*, longer each time, until a worker comes up
on it; a node that left and returned starts with a clean record. A node that fails again and again, although workers
come up on it in between, is *quarantined* (:mod:`planaria.control.policies.quarantine`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planaria.control.policies.quarantine import (
    LONGEST_S,
    WINDOW_S,
    Blame,
    Fault,
    Quarantine,
    Record,
    Tolerate,
    carried_out,
    decide,
    inherited,
    note,
)

FIRST_REST_S = 1.0
LONGEST_REST_S = 60.0


@dataclass
class _Rest:
    failures: int = 0
    rested_at: float = 0.0


class NodeTrust:
    """Failures by node since a worker last came up there, and what is held against each node."""

    def __init__(self) -> None:
        self._rests: dict[str, _Rest] = {}
        self._records: dict[str, Record] = {}
        self._hosts: dict[str, str] = {}
        self._shared: set[str] = set()
        """Addresses that several nodes had at once, which therefore name no machine."""
        self._departed: dict[str, tuple[float, Record]] = {}
        """By host: what was held against the node that left last, and when it left."""

    # -- rest --------------------------------------------------------------------------------------

    def failed(self, node: str, now: float, reason: str = "") -> None:
        """A worker on ``node`` was lost or did not come up."""
        rest = self._rests.setdefault(node, _Rest())
        rest.failures += 1
        pause = min(LONGEST_REST_S, FIRST_REST_S * 2.0 ** min(rest.failures - 1, 32))
        rest.rested_at = max(rest.rested_at, now + pause)
        self.blame(node, Blame(now, Fault.FAILURE, reason))

    def proved(self, node: str) -> None:
        """A worker came up on ``node``, or the node is new. What it is blamed for stays."""
        self._rests.pop(node, None)

    def suspects(self) -> set[str]:
        """Nodes with a failure since a worker last came up there."""
        return set(self._rests)

    def usable(self, node: str, now: float) -> bool:
        """Whether a worker may be started on ``node`` now."""
        rest, record = self._rests.get(node), self._records.get(node)
        return (rest is None or now >= rest.rested_at) and not (record is not None and record.held(now))

    # -- quarantine --------------------------------------------------------------------------------

    def blame(self, node: str, blame: Blame) -> None:
        """Something speaks against ``node``."""
        self._records[node] = note(self._records.get(node, Record()), blame)

    def decide(
        self, node: str, places: Mapping[str, int], failures: int, min_workers: int, now: float
    ) -> Quarantine | Tolerate | None:
        """What to do about ``node`` after a blame; a quarantine is in force from then on.

        Args:
            node: the one that was blamed.
            places: how many workers each node of the cluster can carry.
            failures: ``elastic.node_failures``.
            min_workers: ``elastic.min_workers``.
            now: monotonic seconds.
        """
        record = self._records.get(node)
        if record is None:
            return None
        left = sum(count for name, count in places.items() if name != node and not self.held(name, now))
        decision = decide(node, record, failures, left, min_workers, now)
        if isinstance(decision, Quarantine):
            self._records[node] = carried_out(record, decision)
        return decision

    def held(self, node: str, now: float) -> bool:
        """Whether ``node`` is in quarantine."""
        record = self._records.get(node)
        return record is not None and record.held(now)

    def record(self, node: str) -> Record:
        """What is held against ``node``."""
        return self._records.get(node, Record())

    def restore(self, node: str, until: float, times: int, reason: str) -> None:
        """``node`` was quarantined in an earlier life of the controller, for the ``times``-th time."""
        self._records[node] = Record((), times, until, reason)

    def arrived(self, node: str, host: str, now: float) -> bool:
        """A node is new; ``host`` is its address. True if it is a machine with a record, under a new name.

        Several nodes may share one address (in containers, in tests): then the address tells nothing.
        """
        if any(other == host for name, other in self._hosts.items() if name != node):
            self._shared.add(host)
        self._hosts[node] = host
        _, departed = self._departed.get(host, (0.0, None))
        kept = inherited(departed, now) if departed is not None and host not in self._shared else None
        if kept is None:
            return False
        self._records[node] = kept
        return True

    def left(self, node: str, now: float) -> None:
        """A node is gone, with its name; what is held against it is kept under its address."""
        self._rests.pop(node, None)
        record, host = self._records.pop(node, None), self._hosts.pop(node, None)
        if record is not None and host is not None:
            self._departed[host] = (now, record)
        # Addresses are reused by other machines, and a fleet on spot sees many: forget what nobody inherits any more.
        forgotten = [name for name, (since, _) in self._departed.items() if now - since > LONGEST_S + WINDOW_S]
        for name in forgotten:
            del self._departed[name]

    def listing(self, now: float) -> list[dict[str, Any]]:
        """Plain rows for status and summary: every node in quarantine or with something against it, by name."""
        return [
            {
                "node": node,
                "quarantined": record.held(now),
                "seconds_left": max(0.0, record.until - now) if record.held(now) else 0.0,
                "times": record.sentences,
                "reason": record.reason,
                "blames": [
                    {"fault": item.fault.value, "reason": item.reason, "seconds_ago": now - item.at}
                    for item in record.blames
                ],
            }
            for node, record in sorted(self._records.items())
            if record.held(now) or record.blames
        ]
