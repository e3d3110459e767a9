"""Which workers get a rank in the next generation, and whether a change is worth it."""

from __future__ import annotations

import time
from dataclasses import replace

from planaria.control import policies as policy
from planaria.control.desk import Desk
from planaria.control.generation import Generation
from planaria.planner.plan import Plan, plan


def choose(desk: Desk, previous: Plan | None) -> Plan:
    """The plan over all ready workers; over those that were not replaced, if that uses no fewer.

    Raises:
        PlanError: there is no legal layout.
    """
    slots = desk.staff.slots()
    job = desk.job
    best = plan(slots, job.layout, desk.facts, job.train.global_batch, previous)
    fresh = [slot for slot in slots if slot.id not in desk.staff.benched]
    if not fresh or not desk.staff.benched.intersection(best.ranks):
        return best
    without = plan(fresh, job.layout, desk.facts, job.train.global_batch, previous)
    if len(without.ranks) < len(best.ranks):
        return best
    benched = tuple(slot.id for slot in slots if slot.id in desk.staff.benched)
    return replace(without, spares=without.spares + benched)


def should_grow(desk: Desk, generation: Generation) -> bool:
    """Whether a plan over all ready workers would use more of them than work now."""
    slots = desk.staff.slots()
    if len(slots) <= len(generation.members):
        desk.seen.calm(0.0, more=False, now=time.monotonic())
        return False
    usable = choose(desk, generation.plan)
    now, more = time.monotonic(), len(usable.ranks) > len(generation.members)
    calm = desk.seen.calm(now - desk.staff.last_change, more, now)
    decision = policy.resize(len(generation.members), len(usable.ranks), desk.job.elastic, calm=calm)
    return isinstance(decision, policy.Grow)
