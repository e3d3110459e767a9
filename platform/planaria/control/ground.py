"""The nodes that the job's processes are on: what each can carry, which are about to leave, and whom not to trust."""

from __future__ import annotations

import time

from planaria.config import ElasticConfig
from planaria.control.journal import Past, quarantined_row
from planaria.control.nodes import NodeTrust
from planaria.control.policies.drain import Notice
from planaria.control.policies.quarantine import Blame, Fault, Quarantine, Tolerate
from planaria.observe.record import RunRecord


class Ground:
    """Called from the controller's thread only.

    Args:
        elastic: limits.
        record: where to tell of it.
    """

    def __init__(self, elastic: ElasticConfig, record: RunRecord) -> None:
        self._elastic, self._record = elastic, record
        self.trust = NodeTrust()
        self.capacity: dict[str, int] = {}
        """Workers that each node can carry."""
        self.leaving: dict[str, Notice] = {}
        """Nodes under notice, and those in quarantine that still carry processes."""
        self._known: set[str] = set()
        self._hosts: dict[str, str] = {}
        """Address of every living node, by its name."""

    @property
    def staying(self) -> dict[str, int]:
        """Workers that each node can carry, of nodes that are not about to leave."""
        return {node: places for node, places in self.capacity.items() if node not in self.leaving}

    def notices(self, deadlines: dict[str, float | None]) -> None:
        """Take the notices of departure in."""
        now = time.monotonic()
        leaving = {node: notice for node, notice in self.leaving.items() if self.trust.held(node, now)}
        for node, when in deadlines.items():
            if node not in self.leaving:
                text = "at a time unknown" if when is None else f"in {max(0.0, when - now):.0f} s"
                self._record.event("notice", f"node {node[:8]} is to leave {text}", node=node)
            leaving[node] = self.leaving.get(node) or Notice(when, "notice", now)
        self.leaving = leaving

    def blame(self, node: str, fault: Fault, reason: str) -> None:
        """Something speaks against a node; too much of it, and it gets no more work for a while."""
        now = time.monotonic()
        if fault is not Fault.FAILURE:
            self.trust.blame(node, Blame(now, fault, reason))
        limits = self._elastic
        decision = self.trust.decide(node, self.capacity, limits.node_failures, limits.min_workers, now)
        if isinstance(decision, Quarantine):
            self.leaving[node] = Notice(None, "quarantine", now)
            text = f"node {node[:8]} gets no work for {decision.until - now:.0f} s: {decision.reason}"
            if decision.short:
                text += f"; {decision.left} places are left, so the job has to wait"
            times = self.trust.record(node).sentences
            self._record.journal(quarantined_row(node, time.time() + decision.until - now, times, decision.reason))
            fields = {"seconds": decision.until - now, "reason": decision.reason}
            self._record.event("quarantined", text, node=node, **fields)
        elif isinstance(decision, Tolerate):
            text = f"node {node[:8]} would be left alone ({decision.reason}), but the job needs it"
            self._record.event("tolerated", text, node=node)

    def look(self, capacity: dict[str, int], hosts: dict[str, str]) -> list[str]:
        """Take a look at the cluster in; returns the nodes that have left.

        Args:
            capacity: workers that each node can carry.
            hosts: address of each living node, also of those without a place; by it a machine is recognised that comes
                back under another name.
        """
        for node in set(capacity) - set(self.capacity):
            if node not in self._known:
                self._known.add(node)
                self.trust.proved(node)
            self._record.event("node_joined", f"node {node[:8]} has {capacity[node]} place(s)", node=node)
        gone = sorted(set(self.capacity) - set(capacity))
        for node in gone:
            self._record.event("node_left", f"node {node[:8]} left", node=node)
            self.trust.left(node, time.monotonic())
        self.capacity = capacity
        self._recognise(hosts)
        return gone

    def _recognise(self, hosts: dict[str, str]) -> None:
        """Find machines that come back under another name, with what is held against them."""
        now = time.monotonic()
        for node in set(self._hosts) - set(hosts):  # first: a machine may leave and return between two looks
            self.trust.left(node, now)
        before, self._hosts = self._hosts, dict(hosts)
        for node in set(hosts) - set(before):
            if self.trust.arrived(node, hosts[node], now):
                record, left_s = self.trust.record(node), self.trust.record(node).until - now
                what = f"gets no work for another {left_s:.0f} s" if left_s > 0 else "is watched"
                text = f"node {node[:8]} is a machine with a record ({record.reason or 'failures'}): it {what}"
                self._record.event("recognised", text, node=node, seconds=max(0.0, left_s))
                if left_s > 0:
                    self.leaving[node] = Notice(None, "quarantine", now)

    def adopt(self, past: Past) -> None:
        """Take up the quarantines of an earlier life of the controller."""
        now = time.monotonic()
        ahead = now - time.time()
        for node, (until, times, reason) in past.quarantined.items():
            self.trust.restore(node, until + ahead, times, reason)
            if self.trust.held(node, now):
                self.leaving[node] = Notice(None, "quarantine", now)
