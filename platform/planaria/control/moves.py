"""Changes that a healthy generation is asked for: all leave at one step boundary, and no step is lost."""

from __future__ import annotations

import time

from planaria.control.choosing import choose, should_grow
from planaria.control.departures import by_node, due
from planaria.control.desk import Desk
from planaria.control.generation import Generation
from planaria.control.policies.decisions import Pause
from planaria.control.policies.drain import Leave
from planaria.control.policies.states import State
from planaria.control.policies.straggler import Replace, replacement


def steer(desk: Desk, generation: Generation) -> None:
    """Change what a healthy generation does, if it is time."""
    if desk.stop is not None and desk.state is not State.STOPPING:
        desk.enter(State.STOPPING)
        desk.tell_members(generation, "request", generation.number, stop=True)
    elif desk.state is not State.RUNNING:
        return
    elif desk.rollback is not None:
        _pause(desk, generation, State.RESIZING, f"going back to step {desk.rollback.to_step}")
    elif quitting := sorted(desk.staff.quitting & set(generation.members)):
        _leave(desk, generation, f"{', '.join(quitting)} told to end", len(desk.staff.slots()))
    elif isinstance(move := due(desk, generation), Leave):
        _leave(desk, generation, f"{', '.join(move.members)}: {move.why}", move.left)
    elif isinstance(move, Pause):
        _leave(desk, generation, f"{', '.join(move.members)} told to end", move.workers)
    elif (slow := _straggler(desk, generation)) is not None:
        _replace(desk, generation, slow)
    elif should_grow(desk, generation):
        _pause(desk, generation, State.RESIZING, "more workers are ready: changing size at the next step")


def _straggler(desk: Desk, generation: Generation) -> Replace | None:
    """Who is to be replaced by whom, if that is wanted and a plan without the straggler is as good."""
    if not desk.job.elastic.replace_stragglers or not desk.seen.standing.stragglers:
        return None
    _, spares = by_node(desk, generation)
    fresh = {node: [ident for ident in members if ident not in desk.staff.benched] for node, members in spares.items()}
    found = replacement(desk.seen.standing, fresh, enabled=True)
    if found is None:
        return None
    slow = found.straggler.member
    if slow not in generation.members:  # the window was that of an earlier generation
        return None
    benched, desk.staff.benched = desk.staff.benched, desk.staff.benched | {slow}
    planned = choose(desk, generation.plan)
    desk.staff.benched = benched
    # A spare that cannot sit where the straggler does (with tp, on its node) is of no use.
    return found if slow not in planned.ranks and len(planned.ranks) >= len(generation.members) else None


def _replace(desk: Desk, generation: Generation, found: Replace) -> None:
    slow = found.straggler
    ident = slow.member
    desk.staff.benched.add(ident)
    fields = {"node": slow.node, "rank": slow.rank, "ratio": slow.ratio, "by": found.by}
    text = f"{ident} on node {slow.node[:8]} computes {slow.ratio:.1f} times as long as the others; {found.by} is there"
    desk.record.event("replacing", text, member=ident, **fields)
    _pause(desk, generation, State.RESIZING, f"{ident} gives its rank away at the next step", why="straggler")


def _leave(desk: Desk, generation: Generation, who: str, left: int) -> None:
    too_few = left < desk.job.elastic.min_workers
    then = "the state is saved, then the job waits for others" if too_few else f"going on with {left}"
    _pause(desk, generation, State.DRAINING, f"{who}; {then}", save=too_few, why="drain")


def _pause(
    desk: Desk, generation: Generation, state: State, text: str, *, save: bool = False, why: str = "resize"
) -> None:
    """Have all workers leave the generation at their next step boundary; no step is lost."""
    desk.enter(state)
    desk.record.event("resize" if state is State.RESIZING else "drain", text, gen=generation.number)
    desk.change_at, generation.pause_cause = time.monotonic(), why
    # A state that is to outlive all memory is saved as at a stop.
    desk.tell_members(generation, "request", generation.number, **{"stop" if save else "pause": True})
