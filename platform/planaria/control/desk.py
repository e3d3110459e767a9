"""What the parts of the controller share: the job, its records, processes and state, and where it stands."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import TCPStore

from planaria.config import JobConfig
from planaria.control import policies as policy
from planaria.control.chronicle import Chronicle
from planaria.control.custody import Custody
from planaria.control.events import Event
from planaria.control.generation import Generation
from planaria.control.members import Life, Member
from planaria.control.observations import Observations
from planaria.control.policies.numerics import RollBack
from planaria.control.policies.states import TRANSITIONS, State, check
from planaria.control.staff import Staff
from planaria.control.status import Status
from planaria.control.ticket import Ticket
from planaria.observe.record import RunRecord
from planaria.planner.plan import ModelFacts
from planaria.runtime.beacon_server import BeaconServer


@dataclass
class Desk:
    """Used from the controller's thread only; what comes from other threads goes through ``tell``."""

    job: JobConfig
    facts: ModelFacts
    run_dir: str
    ticket: Ticket
    host: str
    record: RunRecord
    view: Status
    beacon: BeaconServer
    store: TCPStore
    """One store for all generations, hosted by no rank, so that no rank's death can take it down."""
    staff: Staff
    custody: Custody
    seen: Observations
    chronicle: Chronicle
    tell: Callable[[Event], None]
    """Put an event into the queue; from any thread."""
    generations: list[Generation] = field(default_factory=list)
    history: list[policy.Generation] = field(default_factory=list)
    """The generations that are over, as the policies see them."""
    state: State = State.WAITING
    entered_at: float = field(default_factory=time.monotonic)
    stop: str | None = None
    """Why the job is to end at the next step boundary, if it is."""
    cause: str = "start"
    """Why the next generation begins, for a person."""
    planned: bool = True
    """Whether the next generation begins without a fault."""
    change_at: float | None = None
    """When the change began that leads to the next generation."""
    rollback: RollBack | None = None
    """To be carried out before the next generation begins."""
    agreed: int = 0
    """Steps done when replicas were last found equal."""
    undecided: set[int] = field(default_factory=set)
    """States that were gone back to because of replicas that differ, without a culprit."""

    @property
    def last(self) -> Generation | None:
        """The newest generation."""
        return self.generations[-1] if self.generations else None

    def enter(self, state: State) -> None:
        """The job is in another state now."""
        if state is not self.state:
            check(self.state, state)
            now = time.monotonic()
            cause = TRANSITIONS.get((self.state, state), "")
            self.record.transition(self.state, state, cause, now - self.entered_at)
            self.chronicle.account.enter(state.value, now)
            self.state, self.entered_at = state, now

    def worker(self, ident: str) -> Member:
        """A worker that is known to be there, or to have been."""
        member = self.staff.workers.get(ident)
        assert member is not None
        return member

    def tell_members(self, generation: Generation, method: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of every worker that is still in a generation, without waiting for it."""
        for ident in generation.pending:
            member = self.staff.workers.get(ident)
            if member is not None and member.life is Life.READY:
                getattr(member.handle, method).options(concurrency_group="control").remote(*args, **kwargs)

    def tell_loaders(self, generation: Generation | None) -> None:
        """Whom to ask for data; nobody, if none is left: each rank builds its own until there are loaders again."""
        if generation is not None:
            self.tell_members(generation, "set_loaders", generation.number, self.staff.loader_handles())
