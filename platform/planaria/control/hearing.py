"""What each event means for the job."""

from __future__ import annotations

import time
from typing import Any

from planaria.control.desk import Desk
from planaria.control.events import Event, Gone, NodesSeen, Said, Saved, Started, StopAsked
from planaria.control.generation import Generation
from planaria.control.health import compare, look_back
from planaria.control.losses import lose
from planaria.control.members import Life
from planaria.runtime.outcome import outcome_of


def take(desk: Desk, event: Event, generation: Generation | None) -> None:
    """Take one event in.

    Args:
        desk: the controller's.
        event: what happened.
        generation: the one that runs, if one does.

    Raises:
        JobFailed: the job cannot go on after that.
    """
    match event:
        case Said(ident, message) if desk.staff.is_keeper(ident):
            member = desk.staff.keepers.get(ident)
            # A keeper that this life of the controller adopts may say again what it wrote before its answer is here.
            if member is not None and member.life is not Life.LOST:
                desk.custody.keeper_said(member.node, message)
        case Said(ident, {"t": "notice", "why": why}):
            desk.record.event("notice", f"{ident} was told to end: {why}", member=ident)
            desk.staff.quitting.add(ident)
        case Said(ident, message):
            desk.chronicle.take(ident, message)
            current = generation is not None and message.get("gen") == generation.number
            if generation is not None and current and ident not in generation.lost:
                _worker_said(desk, ident, generation, message)
        case Saved():
            desk.custody.saved(event, desk.generations)
        case Gone(ident, why):
            lose(desk, ident, generation, why)
        case Started():
            if desk.staff.started(event):
                if desk.staff.is_loader(event.ident):
                    desk.tell_loaders(generation)
                elif desk.staff.is_keeper(event.ident):
                    desk.custody.announce_ring()
        case NodesSeen(capacity, leaving, hosts):
            desk.staff.ground.notices(leaving)
            for ident, why in desk.staff.nodes(capacity, hosts):
                lose(desk, ident, generation, why)
        case StopAsked(why):
            desk.stop = desk.stop or why


def _worker_said(desk: Desk, ident: str, generation: Generation, message: dict[str, Any]) -> None:
    now = time.monotonic()
    desk.seen.heard(ident, desk.worker(ident).node, generation, message, now)
    desk.custody.worker_said(generation, message)
    match message["t"]:
        case "end":
            generation.outcomes[ident] = outcome_of(message["outcome"])
        case "step" if message["rank"] == 0:
            generation.last_step_at = now
            look_back(desk, generation, message)
        case "replicas":
            compare(desk, generation, message)
