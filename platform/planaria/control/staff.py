"""The job's processes: who is there, who is on the way, who was lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import ray

from planaria.config import JobConfig
from planaria.control.events import Event, Started
from planaria.control.failure import JobFailed
from planaria.control.ground import Ground
from planaria.control.journal import Past, lost_row, member_row
from planaria.control.members import Life, Member, Members
from planaria.control.policies.quarantine import Fault
from planaria.memory.wire import KeeperAddress
from planaria.observe.record import RunRecord
from planaria.planner.plan import WorkerSlot
from planaria.runtime.beacon import BeaconAddress
from planaria.runtime.fleet import Fleet

LOADER_TRIES = 3


class Staff:
    """Processes of all kinds, and the nodes that they are on.

    Called from the controller's thread only; answers come back as events.
    """

    def __init__(self, job: JobConfig, fleet: Fleet, record: RunRecord, tell: Callable[[Event], None]) -> None:
        self.job, self.fleet, self.record, self._tell = job, fleet, record, tell
        self.workers, self.loaders, self.keepers = Members("worker"), Members("loader"), Members("keeper")
        self.standbys, self.seats = Members("standby"), Members("seat")
        self.kinds = (self.workers, self.loaders, self.keepers, self.standbys, self.seats)
        self.ground = Ground(job.elastic, record)
        self.quitting: set[str] = set()
        """Workers that were told, by somebody else, to end."""
        self.benched: set[str] = set()
        """Workers that compute too slowly: they get a rank only where nobody else can have it."""
        self.last_arrival = self.last_change = time.monotonic()
        """When a process last came up, and when a worker last came up or was lost."""
        self.trouble = ""
        """Why the last process that could not start did not; empty once a worker came up."""
        self._loader_failures = 0

    def slots(self) -> list[WorkerSlot]:
        """Ready workers on nodes that stay and whose keeper is ready, up to the job's maximum, for the planner."""
        kept = self.keeper_addresses().keys() - self.ground.leaving.keys()
        staying = [slot for slot in self.workers.slots() if slot.node in kept and slot.id not in self.quitting]
        return staying[: self.job.elastic.max_workers]

    def keeper_addresses(self) -> dict[str, KeeperAddress]:
        """Ready keepers by their nodes."""
        return {member.node: member.address for member in self.keepers.of(Life.READY) if member.address is not None}

    def ready(self) -> list[Member]:
        """Processes that have answered, and are not lost."""
        return [m for kind in self.kinds for m in kind.of(Life.READY)]

    def starting(self) -> list[str]:
        """Processes that have not answered yet."""
        return [m.ident for kind in self.kinds for m in kind.of(Life.STARTING)]

    def dispensable(self, ident: str) -> bool:
        """Whether a process on a node under notice can go as far as the data are concerned: a loader only when another
        one, on a node that stays, is ready."""
        staying = (member.node not in self.ground.leaving for member in self.loaders.of(Life.READY))
        return not self.is_loader(ident) or any(staying)

    def loader_handles(self) -> list[Any]:
        """Loaders that answer."""
        return [member.handle for member in self.loaders.of(Life.READY)]

    def settled(self) -> bool:
        """Whether nobody else can be expected on the nodes that are there."""
        starting = any(self.workers.of(Life.STARTING)) or any(self.keepers.of(Life.STARTING))
        places = sum(self.ground.staying.values())
        return not starting and len(self.slots()) >= places > 0

    def start(self, members: Members, node: str, start: Callable[[str, str], Any], ident: str = "") -> None:
        """Start a process of a kind on ``node``."""
        ident = ident or members.next_ident()
        self.record.journal(member_row(ident, node))
        handle = start(ident, node)
        members.add(Member(ident, node, handle))
        self._when_ready(ident, _control(members, handle.ready).remote())

    def adopt(self, past: Past, beacon: BeaconAddress) -> None:
        """Find the processes of an earlier life of the controller again; each answers as if it had just started."""
        self.ground.adopt(past)
        for ident, node in past.members.items():
            members, member = self._kind(ident), Member(ident, node, None)
            members.add(member)
            if ident in past.promoted:
                members = self.workers
                members.add(self.standbys.remove(ident))
            if ident in past.lost:
                members.lose(ident)
            elif (handle := self.fleet.find(ident)) is None:
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
            self.ground.trust.proved(member.node)
            self.trouble = ""
            self.last_change = time.monotonic()
        self.record.event("joined", f"{event.ident} is ready", member=event.ident, node=member.node, pid=member.pid)
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
        self.record.event("lost", f"{ident} lost: {why}", member=ident, node=member.node, pid=member.pid)
        self._leave_seat(ident)
        self.record.journal(lost_row(ident))
        if member.handle is not None:
            self.fleet.kill(member.handle)
        if members is self.workers:
            self.last_change = time.monotonic()
        self.ground.trust.failed(member.node, time.monotonic(), f"{ident}: {why}")
        if member.node in self.ground.capacity:
            self.ground.blame(member.node, Fault.FAILURE, why)
        return True

    def dismiss(self, ident: str, why: str) -> bool:
        """End a process that is not needed any more, through no fault of its node; False if it was gone already."""
        members = self._of(ident)
        member = members.get(ident)
        if member is None or not members.lose(ident):
            return False
        self.record.event("dismissed", f"{ident} ended: {why}", member=ident, node=member.node, pid=member.pid)
        self.record.journal(lost_row(ident))
        self.fleet.kill(member.handle)
        self._leave_seat(ident)
        return True

    def _leave_seat(self, ident: str) -> None:
        if is_standby(ident):
            self.dismiss(seat_of(ident), f"{ident} is gone")

    def on_nodes(self, nodes: Iterable[str]) -> list[Member]:
        """Living processes on these nodes."""
        wanted = set(nodes)
        return [m for kind in self.kinds for m in kind.of(Life.STARTING, Life.READY) if m.node in wanted]

    def nodes(self, capacity: dict[str, int], hosts: dict[str, str] | None = None) -> list[tuple[str, str]]:
        """Take a look at the cluster in; returns the processes (with the reason) whose nodes have left.

        Args: as those of :meth:`Ground.look`.
        """
        gone = self.ground.look(capacity, hosts or {})
        return [(member.ident, f"its node {member.node[:8]} left") for member in self.on_nodes(gone)]

    def end_all(self) -> None:
        """End every process."""
        for members in self.kinds:
            for member in members.of(Life.STARTING, Life.READY):
                self.fleet.kill(member.handle)

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
        return next((kind for kind in self.kinds if ident.startswith(f"{kind.kind}-")), self.workers)


def _control(members: Members, method: Any) -> Any:
    """A method of a member's handle; a worker answers beside its training thread."""
    return method.options(concurrency_group="control") if members.kind in ("worker", "standby") else method


def is_standby(ident: str) -> bool:
    """Whether a process was started as a standby."""
    return ident.startswith("standby-")


def seat_of(ident: str) -> str:
    """The process that occupies, in Ray's books, what a promoted standby uses."""
    return ident.replace("standby-", "seat-")
