"""The job's processes: start them where there is room, replace those that are lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import ray

from planaria.config import JobConfig
from planaria.control.events import Event, Started
from planaria.control.failure import JobFailed
from planaria.control.journal import Past, lost_row, member_row, promoted_row, quarantined_row
from planaria.control.members import Life, Member, Members, placements
from planaria.control.nodes import NodeTrust
from planaria.control.policies.drain import Notice
from planaria.control.policies.quarantine import Blame, Fault, Quarantine, Tolerate
from planaria.memory.wire import KeeperAddress
from planaria.observe.record import RunRecord
from planaria.planner.plan import WorkerSlot
from planaria.runtime.beacon import BeaconAddress
from planaria.runtime.fleet import Fleet

START_LIMIT_S = 180.0
"""A worker or loader that has not come up by then is started again elsewhere."""
LOADER_TRIES = 3


class Staff:
    """Workers and loaders. Called from the controller's thread only; answers come back as events."""

    def __init__(self, job: JobConfig, fleet: Fleet, record: RunRecord, tell: Callable[[Event], None]) -> None:
        self._job, self._fleet, self._record, self._tell = job, fleet, record, tell
        self.workers, self.loaders, self.keepers = Members("worker"), Members("loader"), Members("keeper")
        self.standbys, self.seats = Members("standby"), Members("seat")
        self._kinds = (self.workers, self.loaders, self.keepers, self.standbys, self.seats)
        self.trust = NodeTrust()
        self.capacity: dict[str, int] = {}
        self.leaving: dict[str, Notice] = {}
        """Nodes under notice, and those in quarantine that still carry processes."""
        self.quitting: set[str] = set()
        """Workers that were told, by somebody else, to end."""
        self.benched: set[str] = set()
        """Workers that compute too slowly: they get a rank only where nobody else can have it."""
        self.last_arrival = self.last_change = time.monotonic()
        """When a process last came up, and when a worker last came up or was lost."""
        self.trouble = ""
        """Why the last process that could not start did not; empty once a worker came up."""
        self._known_nodes: set[str] = set()
        self._hosts: dict[str, str] = {}
        """Address of every living node, by its name."""
        self._loader_failures = 0

    def slots(self) -> list[WorkerSlot]:
        """Ready workers on nodes that stay and whose keeper is ready, up to the job's maximum, for the planner."""
        kept = self.keeper_addresses().keys() - self.leaving.keys()
        staying = [slot for slot in self.workers.slots() if slot.node in kept and slot.id not in self.quitting]
        return staying[: self._job.elastic.max_workers]

    def keeper_addresses(self) -> dict[str, KeeperAddress]:
        """Ready keepers by their nodes."""
        return {member.node: member.address for member in self.keepers.of(Life.READY) if member.address is not None}

    def ready(self) -> list[Member]:
        """Processes that have answered, and are not lost."""
        return [m for kind in self._kinds for m in kind.of(Life.READY)]

    def starting(self) -> list[str]:
        """Processes that have not answered yet."""
        return [m.ident for kind in self._kinds for m in kind.of(Life.STARTING)]

    def dispensable(self, ident: str) -> bool:
        """Whether a process on a node under notice can go as far as the data are concerned: a loader only when another
        one, on a node that stays, is ready."""
        staying = (member.node not in self.leaving for member in self.loaders.of(Life.READY))
        return not self.is_loader(ident) or any(staying)

    def loader_handles(self) -> list[Any]:
        """Loaders that answer."""
        return [member.handle for member in self.loaders.of(Life.READY)]

    def settled(self) -> bool:
        """Whether nobody else can be expected on the nodes that are there."""
        starting = any(self.workers.of(Life.STARTING)) or any(self.keepers.of(Life.STARTING))
        places = sum(places for node, places in self.capacity.items() if node not in self.leaving)
        return not starting and len(self.slots()) >= places > 0

    def fill(self, calm: bool = False) -> None:
        """Promote standbys and start workers where there is room, up to the maximum, and whoever else is missing.

        Args:
            calm: whether training runs, so that there is time to prepare for the next fault.
        """
        now = time.monotonic()
        for member in [m for kind in self._kinds for m in kind.of(Life.STARTING)]:
            if now - member.since > START_LIMIT_S:
                self.lose(member.ident, f"did not come up within {START_LIMIT_S:.0f} s")
        staying = {node: places for node, places in self.capacity.items() if node not in self.leaving}
        self._promote(staying)
        carried = self.workers.per_node()
        usable = {node: places for node, places in staying.items() if self.trust.usable(node, now)}
        # A start on a node under suspicion may hang until Ray finds the node dead; it must not take the
        # place of one that another node could have.
        doubtful = sum(1 for m in self.workers.of(Life.STARTING) if m.node in self.trust.suspects())
        counted = sum(count for node, count in carried.items() if node not in self.leaving)
        wanted = self._job.elastic.max_workers - counted + doubtful
        for node in placements(usable, carried, wanted):
            self._start(self.workers, node, self._fleet.start_worker)
        self._fill_keepers(usable)
        self._fill_loaders(usable)
        if calm and not self.starting():  # one at a time: they must not be in the way of training
            self._prepare(usable)

    def _promote(self, staying: dict[str, int]) -> None:
        """Have standbys take the places of workers of their nodes that are gone: that costs no process start."""
        carried = self.workers.per_node()
        counted = sum(count for node, count in carried.items() if node in staying)
        for standby in list(self.standbys.of(Life.READY)):
            free = staying.get(standby.node, 0) - carried.get(standby.node, 0)
            if free < 1 or counted >= self._job.elastic.max_workers:
                continue
            carried[standby.node], counted = carried.get(standby.node, 0) + 1, counted + 1
            self._record.journal(promoted_row(standby.ident))
            member = self.standbys.remove(standby.ident)
            gone = [m for m in self.workers.of(Life.LOST) if m.node == member.node and m.gpus]
            taken = {m.gpus for m in self.workers.of(Life.READY)}
            member.gpus = next((m.gpus for m in reversed(gone) if m.gpus not in taken), "")
            self.workers.add(member)
            text = f"{member.ident} takes a place on node {member.node[:8]}"
            self._record.event("promoted", text, member=member.ident, node=member.node)

    def _prepare(self, usable: dict[str, int]) -> None:
        """Start one more standby, or a seat for a standby that was promoted."""
        for member in self.workers.of(Life.READY):
            if _is_standby(member.ident) and self.seats.get(_seat_of(member.ident)) is None:
                self._start(self.seats, member.node, self._fleet.start_seat, _seat_of(member.ident))
                return
        carried, working = self.standbys.per_node(), self.workers.per_node()
        for node in usable:
            if working.get(node, 0) and carried.get(node, 0) < self._fleet.standbys:
                self._start(self.standbys, node, self._fleet.start_standby)
                return

    def _fill_keepers(self, usable: dict[str, int]) -> None:
        """One keeper on every node."""
        carried = self.keepers.per_node()
        for node in usable:
            if node not in carried:
                self._start(self.keepers, node, self._fleet.start_keeper)

    def _fill_loaders(self, usable: dict[str, int]) -> None:
        """Start missing loaders, each on the node with the fewest: the loss of one node must not take all."""
        staying = [node for node in self.capacity if node not in self.leaving]
        counted = [m for m in self.loaders.of(Life.STARTING, Life.READY) if m.node not in self.leaving]
        for _ in range(self._job.data.loaders - len(counted)):
            if not staying:
                return
            carried = self.loaders.per_node()
            # Better on a node under suspicion than two on one node, or none at all.
            node = min(staying, key=lambda name: (carried.get(name, 0), name not in usable, name))
            self._start(self.loaders, node, self._fleet.start_loader)

    def _start(self, members: Members, node: str, start: Callable[[str, str], Any], ident: str = "") -> None:
        ident = ident or members.next_ident()
        self._record.journal(member_row(ident, node))
        handle = start(ident, node)
        members.add(Member(ident, node, handle))
        self._when_ready(ident, _control(members, handle.ready).remote())

    def adopt(self, past: Past, beacon: BeaconAddress) -> None:
        """Find the processes of an earlier life of the controller again; each answers as if it had just started."""
        ahead, now = time.monotonic() - time.time(), time.monotonic()
        for node, (until, times, reason) in past.quarantined.items():
            self.trust.restore(node, until + ahead, times, reason)
            if self.trust.held(node, now):
                self.leaving[node] = Notice(None, "quarantine", now)
        for ident, node in past.members.items():
            members, member = self._kind(ident), Member(ident, node, None)
            members.add(member)
            if ident in past.promoted:
                members = self.workers
                members.add(self.standbys.remove(ident))
            if ident in past.lost:
                members.lose(ident)
            elif (handle := self._fleet.find(ident)) is None:
                self.lose(ident, "it ended while the controller was away")
            else:
                member.handle = handle
                self._when_ready(ident, _control(members, handle.adopt).remote(beacon))

    def _when_ready(self, ident: str, reference: Any) -> None:
        def done(future: Any) -> None:
            error = future.exception()
            self._tell(Started(ident, error=error) if error is not None else Started(ident, future.result()))

        reference.future().add_done_callback(done)

    def started(self, event: Started) -> bool:
        """A process answered for the first time, or could not start; returns whether it is ready now.

        Raises:
            JobFailed: it failed in a way that another try cannot mend.
        """
        members = self._of(event.ident)
        member = members.get(event.ident)
        if member is None or member.life is not Life.STARTING:
            return False
        if event.error is not None:
            self._start_failed(event.ident, event.error)
            return False
        assert event.hello is not None
        members.ready(event.ident, event.hello)
        self.last_arrival = time.monotonic()
        if members is self.loaders:
            self._loader_failures = 0
        elif members is self.workers:
            self.trust.proved(member.node)
            self.trouble = ""
            self.last_change = time.monotonic()
        self._record.event("joined", f"{event.ident} is ready", member=event.ident, node=member.node, pid=member.pid)
        return True

    def _start_failed(self, ident: str, error: BaseException) -> None:
        cause = getattr(error, "cause", None)
        if self.is_loader(ident) and isinstance(cause, Exception):
            self._loader_failures += 1
            hopeless = not isinstance(cause, OSError) or self._loader_failures > LOADER_TRIES
            # Where another loader reads the same data, the fault is this node's (a folder that it lacks).
            if hopeless and not self.loader_handles():
                raise JobFailed(f"the data cannot be opened: {cause}")
        elif isinstance(error, ray.exceptions.RayTaskError):
            raise JobFailed(f"{ident} cannot start: {cause or error}")
        # Ray's text is a traceback where the process itself raised; the last line says what.
        last = str(cause or error).strip().rpartition("\n")[2].strip()[:300]
        self.trouble = f"{ident}: {type(error).__name__}: {last}"
        self.lose(ident, f"{type(error).__name__} while starting: {last}")

    def lose(self, ident: str, why: str) -> bool:
        """A process is gone, or shall be; returns False if that was known."""
        members = self._of(ident)
        member = members.get(ident)
        if member is None or not members.lose(ident):
            return False
        self._record.event("lost", f"{ident} lost: {why}", member=ident, node=member.node, pid=member.pid)
        self._leave_seat(ident)
        self._record.journal(lost_row(ident))
        if member.handle is not None:
            self._fleet.kill(member.handle)
        if members is self.workers:
            self.last_change = time.monotonic()
        self.trust.failed(member.node, time.monotonic(), f"{ident}: {why}")
        if member.node in self.capacity:
            self.blame(member.node, Fault.FAILURE, why)
        return True

    def dismiss(self, ident: str, why: str) -> bool:
        """End a process that is not needed any more, through no fault of its node; False if it was gone already."""
        members = self._of(ident)
        member = members.get(ident)
        if member is None or not members.lose(ident):
            return False
        self._record.event("dismissed", f"{ident} ended: {why}", member=ident, node=member.node, pid=member.pid)
        self._record.journal(lost_row(ident))
        self._fleet.kill(member.handle)
        self._leave_seat(ident)
        return True

    def _leave_seat(self, ident: str) -> None:
        if _is_standby(ident):
            self.dismiss(_seat_of(ident), f"{ident} is gone")

    def on_nodes(self, nodes: Iterable[str]) -> list[Member]:
        """Living processes on these nodes."""
        wanted = set(nodes)
        return [m for kind in self._kinds for m in kind.of(Life.STARTING, Life.READY) if m.node in wanted]

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
        elastic = self._job.elastic
        decision = self.trust.decide(node, self.capacity, elastic.node_failures, elastic.min_workers, now)
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

    def nodes(self, capacity: dict[str, int], hosts: dict[str, str] | None = None) -> list[tuple[str, str]]:
        """Take a look at the cluster in; returns the processes (with the reason) whose nodes have left.

        Args:
            capacity: workers that each node can carry.
            hosts: address of each living node, also of those without a place; without it no machine is recognised
                that comes back under another name.
        """
        for node in set(capacity) - set(self.capacity):
            if node not in self._known_nodes:
                self._known_nodes.add(node)
                self.trust.proved(node)
            self._record.event("node_joined", f"node {node[:8]} has {capacity[node]} place(s)", node=node)
        orphans: list[tuple[str, str]] = []
        for node in set(self.capacity) - set(capacity):
            self._record.event("node_left", f"node {node[:8]} left", node=node)
            self.trust.left(node, time.monotonic())
            orphans += [(member.ident, f"its node {node[:8]} left") for member in self.on_nodes([node])]
        self.capacity = capacity
        self._recognise(hosts or {})
        return orphans

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

    def end_all(self) -> None:
        """End every process."""
        for members in self._kinds:
            for member in members.of(Life.STARTING, Life.READY):
                self._fleet.kill(member.handle)

    @staticmethod
    def is_loader(ident: str) -> bool:
        """Whether the name is a loader's."""
        return ident.startswith("loader-")

    @staticmethod
    def is_keeper(ident: str) -> bool:
        """Whether the name is a keeper's."""
        return ident.startswith("keeper-")

    def _of(self, ident: str) -> Members:
        """The members among whom a process counts now."""
        return self.workers if self.workers.get(ident) is not None else self._kind(ident)

    def _kind(self, ident: str) -> Members:
        """The members among whom a process was started."""
        return next((kind for kind in self._kinds if ident.startswith(f"{kind.kind}-")), self.workers)


def _control(members: Members, method: Any) -> Any:
    """A method of a member's handle; a worker answers beside its training thread."""
    return method.options(concurrency_group="control") if members.kind in ("worker", "standby") else method


def _is_standby(ident: str) -> bool:
    return ident.startswith("standby-")


def _seat_of(ident: str) -> str:
    """The process that occupies, in Ray's books, what a promoted standby uses."""
    return ident.replace("standby-", "seat-")
