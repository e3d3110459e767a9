"""Processes that are lost, or not needed any more, and what follows from it."""

from __future__ import annotations

import time

from planaria.control.desk import Desk
from planaria.control.generation import Generation


def lose(desk: Desk, ident: str, generation: Generation | None, why: str) -> None:
    """A process is gone, or is to be treated so.

    Args:
        desk: the controller's.
        ident: the process.
        generation: the one that runs, if one does.
        why: the evidence.
    """
    if not desk.staff.lose(ident, why):
        return
    desk.beacon.cut(ident)
    if desk.staff.is_keeper(ident):
        _keeper_lost(desk, ident, generation, why)
    elif desk.staff.is_loader(ident):
        desk.tell_loaders(generation)
    elif generation is not None and ident in generation.pending:
        generation.lost[ident] = why
        desk.seen.shrunk(time.monotonic())


def _keeper_lost(desk: Desk, ident: str, generation: Generation | None, why: str) -> None:
    """The memory of a node is gone. Ranks that kept their state there leave the generation, unharmed."""
    member = desk.staff.keepers.get(ident)
    assert member is not None
    desk.custody.keeper_lost(member.node)
    if generation is not None and member.node in generation.nodes:
        generation.lost[ident] = f"{why}, and with it the snapshots of node {member.node[:8]}"


def dismiss(desk: Desk, ident: str, why: str, generation: Generation | None) -> None:
    """End a process that is not needed any more."""
    if desk.staff.dismiss(ident, why):
        desk.beacon.cut(ident)
        member = desk.staff.keepers.get(ident)
        if desk.staff.is_loader(ident):
            desk.tell_loaders(generation)
        elif member is not None:
            desk.custody.keeper_lost(member.node)
