"""A controller that was lost has returned: it takes up what its earlier life left."""

from __future__ import annotations

import time
from collections.abc import Callable

from planaria.control.desk import Desk
from planaria.control.generation import Generation
from planaria.control.journal import Past
from planaria.control.losses import lose
from planaria.control.members import Life
from planaria.control.policies.states import State
from planaria.control.status import generation_row
from planaria.runtime.outcome import End, Outcome

ADOPT_S = 10.0
"""A process that takes longer to answer a controller that has returned counts as lost."""


def take_up(desk: Desk, past: Past, wait: Callable[[Generation | None], None]) -> Generation | None:
    """Find the processes again, and the generation that they run, if they do.

    Args:
        desk: the controller's.
        past: what the journal says.
        wait: takes events in for a moment.
    """
    desk.generations[:], desk.history[:] = past.generations, past.history
    generation = past.unfinished
    desk.record.event("returned", "the controller was lost and has returned", members=len(past.members))
    desk.custody.returned(generation)
    desk.chronicle.returned(past.sizes)
    desk.staff.adopt(past, desk.beacon.address)
    if generation is not None:
        desk.view.generations = [generation_row(item) for item in desk.generations]
        desk.enter(State.RUNNING if generation.first_step_at is not None else State.FORMING)
    deadline = time.monotonic() + ADOPT_S
    while (silent := desk.staff.starting()) and time.monotonic() < deadline:
        wait(generation)
    for ident in silent:
        lose(desk, ident, generation, f"did not answer the returned controller within {ADOPT_S:.0f} s")
    if generation is None:
        return None
    for ident in generation.members:
        member = desk.staff.workers.get(ident)
        if member is None or member.life is not Life.READY:
            generation.lost.setdefault(ident, "it ended while the controller was away")
        elif member.generation < generation.number:
            # Its order was never sent, so that it plays no part in a generation that others may have begun.
            generation.outcomes[ident] = Outcome(End.ABORTED, generation.start_step)
    return generation
