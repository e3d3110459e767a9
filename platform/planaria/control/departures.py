"""Nodes and workers that are told to leave."""

from __future__ import annotations

import time

from planaria.control.desk import Desk
from planaria.control.generation import Generation
from planaria.control.losses import dismiss
from planaria.control.policies.decisions import Pause
from planaria.control.policies.drain import Leave, Stay, drain


def by_node(desk: Desk, generation: Generation) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """(members of a generation, ready workers without a rank), each by node."""
    running: dict[str, list[str]] = {}
    for ident in generation.members:
        running.setdefault(desk.worker(ident).node, []).append(ident)
    spares: dict[str, list[str]] = {}
    for slot in desk.staff.slots():
        if slot.id not in generation.members:
            spares.setdefault(slot.node, []).append(slot.id)
    return running, spares


def due(desk: Desk, generation: Generation) -> Stay | Leave | Pause:
    """What to do about nodes under notice."""
    running, spares = by_node(desk, generation)
    steps, now = desk.seen.step_s, time.monotonic()
    return drain(desk.staff.ground.leaving, running, spares, steps, now, desk.job.elastic, desk.custody.save_s)


def release(desk: Desk, generation: Generation | None) -> None:
    """End what is left on nodes under notice, as soon as nobody needs it: they shall not wait for their deadline.

    Args:
        desk: the controller's.
        generation: the one that runs, if one does.
    """
    staff, at_work, needed = desk.staff, set[str](), set(desk.staff.ground.leaving)
    if generation is not None:
        at_work = set(generation.members)
        needed = set(generation.nodes) if generation.covered else needed
    elif not desk.generations or desk.generations[-1].step == desk.view.checkpoint_step:
        needed = set()  # the state is durable
    for member in staff.on_nodes(staff.ground.leaving):
        kept = staff.is_keeper(member.ident) and (member.node in needed or desk.custody.needs(member.node))
        if member.ident not in at_work and not kept and staff.dispensable(member.ident):
            dismiss(desk, member.ident, "its node is to leave", generation)
    for ident in staff.quitting - at_work:
        staff.quitting.discard(ident)
        dismiss(desk, ident, "it was told to end", generation)
