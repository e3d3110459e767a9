"""The job's processes: start them where there is room, replace those that are lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray

from planaria.config import JobConfig
from planaria.control.events import Event, Started
from planaria.control.failure import JobFailed
from planaria.control.members import Life, Member, Members, placements
from planaria.control.nodes import NodeTrust
from planaria.memory.wire import KeeperAddress
from planaria.observe.record import RunRecord
from planaria.planner.plan import WorkerSlot
from planaria.runtime.fleet import Fleet

START_LIMIT_S = 180.0
"""A worker or loader that has not come up by then is started again elsewhere."""
LOADER_TRIES = 3


class Staff:
    """Workers and loaders. Called from the controller's thread only; answers come back as events."""

    def __init__(self, job: JobConfig, fleet: Fleet, record: RunRecord, tell: Callable[[Event], None]) -> None:
        self._job, self._fleet, self._record, self._tell = job, fleet, record, tell
        self.workers, self.loaders, self.keepers = Members("worker"), Members("loader"), Members("keeper")
        self.trust = NodeTrust()
        self.capacity: dict[str, int] = {}
        self.last_arrival = time.monotonic()
        self.trouble = ""
        """Why the last process that could not start did not; empty once a worker came up."""
        self._known_nodes: set[str] = set()
        self._loader_failures = 0

    def slots(self) -> list[WorkerSlot]:
        """Ready workers on nodes whose keeper is ready, up to the job's maximum, for the planner."""
        kept = self.keeper_addresses()
        return [slot for slot in self.workers.slots() if slot.node in kept][: self._job.elastic.max_workers]

    def keeper_addresses(self) -> dict[str, KeeperAddress]:
        """Ready keepers by their nodes."""
        return {member.node: member.address for member in self.keepers.of(Life.READY) if member.address is not None}

    def loader_handles(self) -> list[Any]:
        """Loaders that answer."""
        return [member.handle for member in self.loaders.of(Life.READY)]

    def settled(self) -> bool:
        """Whether nobody else can be expected on the nodes that are there."""
        starting = any(self.workers.of(Life.STARTING)) or any(self.keepers.of(Life.STARTING))
        return not starting and len(self.workers.slots()) >= sum(self.capacity.values()) > 0

    def fill(self) -> None:
        """Start workers where there is room, up to the maximum, and missing loaders."""
        now = time.monotonic()
        for member in [
            *self.workers.of(Life.STARTING),
            *self.loaders.of(Life.STARTING),
            *self.keepers.of(Life.STARTING),
        ]:
            if now - member.since > START_LIMIT_S:
                self.lose(member.ident, f"did not come up within {START_LIMIT_S:.0f} s")
        carried = self.workers.per_node()
        usable = {node: places for node, places in self.capacity.items() if self.trust.usable(node, now)}
        # A start on a node under suspicion may hang until Ray finds the node dead; it must not take the
        # place of one that another node could have.
        doubtful = sum(1 for m in self.workers.of(Life.STARTING) if m.node in self.trust.suspects())
        wanted = self._job.elastic.max_workers - sum(carried.values()) + doubtful
        for node in placements(usable, carried, wanted):
            ident = self.workers.next_ident()
            handle = self._fleet.start_worker(ident, node)
            self.workers.add(Member(ident, node, handle))
            self._when_ready(ident, handle.ready.options(concurrency_group="control").remote())
        self._fill_keepers(usable)
        self._fill_loaders(usable)

    def _fill_keepers(self, usable: dict[str, int]) -> None:
        """One keeper on every node."""
        carried = self.keepers.per_node()
        for node in usable:
            if node not in carried:
                ident = self.keepers.next_ident()
                handle = self._fleet.start_keeper(ident, node)
                self.keepers.add(Member(ident, node, handle))
                self._when_ready(ident, handle.ready.remote())

    def _fill_loaders(self, usable: dict[str, int]) -> None:
        """Start missing loaders, each on the node with the fewest: the loss of one node must not take all."""
        # Better on a node under suspicion than none at all.
        usable = usable or self.capacity
        for _ in range(self._job.data.loaders - len(list(self.loaders.of(Life.STARTING, Life.READY)))):
            if not usable:
                return
            carried = self.loaders.per_node()
            node = min(usable, key=lambda name: (carried.get(name, 0), name))
            ident = self.loaders.next_ident()
            handle = self._fleet.start_loader(ident, node)
            self.loaders.add(Member(ident, node, handle))
            self._when_ready(ident, handle.ready.remote())

    def _when_ready(self, ident: str, reference: Any) -> None:
        def done(future: Any) -> None:
            error = future.exception()
            self._tell(Started(ident, error=error) if error is not None else Started(ident, *future.result()))

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
        members.ready(event.ident, event.pid, event.node)
        member.address = event.address
        self.last_arrival = time.monotonic()
        if members is self.loaders:
            self._loader_failures = 0
        elif members is self.workers:
            self.trust.proved(member.node)
            self.trouble = ""
        self._record.event("joined", f"{event.ident} is ready", member=event.ident, node=member.node, pid=event.pid)
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
        self._fleet.kill(member.handle)
        self.trust.failed(member.node, time.monotonic())
        return True

    def nodes(self, capacity: dict[str, int]) -> list[tuple[str, str]]:
        """Take a look at the cluster in; returns the processes (with the reason) whose nodes have left."""
        for node in set(capacity) - set(self.capacity):
            if node not in self._known_nodes:
                self._known_nodes.add(node)
                self.trust.proved(node)
            self._record.event("node_joined", f"node {node[:8]} has {capacity[node]} place(s)", node=node)
        orphans: list[tuple[str, str]] = []
        for node in set(self.capacity) - set(capacity):
            self._record.event("node_left", f"node {node[:8]} left", node=node)
            for members in (self.workers, self.loaders, self.keepers):
                living = members.of(Life.STARTING, Life.READY)
                orphans += [(member.ident, f"its node {node[:8]} left") for member in living if member.node == node]
        self.capacity = capacity
        return orphans

    def end_all(self) -> None:
        """End every process."""
        for members in (self.workers, self.loaders, self.keepers):
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
        if self.is_keeper(ident):
            return self.keepers
        return self.loaders if self.is_loader(ident) else self.workers
