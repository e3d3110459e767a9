"""Who is missing, and where to start or promote somebody: workers, keepers, loaders, standbys."""

from __future__ import annotations

import time

from planaria.control.journal import promoted_row
from planaria.control.members import Life, placements
from planaria.control.staff import Staff, is_standby, seat_of

START_LIMIT_S = 180.0
"""A worker or loader that has not come up by then is started again elsewhere."""


def fill(staff: Staff, calm: bool = False) -> None:
    """Promote standbys and start workers where there is room, up to the maximum, and whoever else is missing.

    Args:
        staff: the job's processes.
        calm: whether training runs, so that there is time to prepare for the next fault.
    """
    now = time.monotonic()
    for member in [m for kind in staff.kinds for m in kind.of(Life.STARTING)]:
        if now - member.since > START_LIMIT_S:
            staff.lose(member.ident, f"did not come up within {START_LIMIT_S:.0f} s")
    staying = staff.ground.staying
    _promote(staff, staying)
    carried = staff.workers.per_node()
    usable = {node: places for node, places in staying.items() if staff.ground.trust.usable(node, now)}
    # A start on a node under suspicion may hang until Ray finds the node dead; it must not take the
    # place of one that another node could have.
    doubtful = sum(1 for m in staff.workers.of(Life.STARTING) if m.node in staff.ground.trust.suspects())
    counted = sum(count for node, count in carried.items() if node not in staff.ground.leaving)
    wanted = staff.job.elastic.max_workers - counted + doubtful
    for node in placements(usable, carried, wanted):
        staff.start(staff.workers, node, staff.fleet.start_worker)
    _fill_keepers(staff, usable)
    _fill_loaders(staff, usable)
    if calm and not staff.starting():  # one at a time: they must not be in the way of training
        _prepare(staff, usable)


def _promote(staff: Staff, staying: dict[str, int]) -> None:
    """Have standbys take the places of workers of their nodes that are gone: that costs no process start."""
    carried = staff.workers.per_node()
    counted = sum(count for node, count in carried.items() if node in staying)
    for standby in list(staff.standbys.of(Life.READY)):
        free = staying.get(standby.node, 0) - carried.get(standby.node, 0)
        if free < 1 or counted >= staff.job.elastic.max_workers:
            continue
        carried[standby.node], counted = carried.get(standby.node, 0) + 1, counted + 1
        staff.record.journal(promoted_row(standby.ident))
        member = staff.standbys.remove(standby.ident)
        gone = [m for m in staff.workers.of(Life.LOST) if m.node == member.node and m.gpus]
        taken = {m.gpus for m in staff.workers.of(Life.READY)}
        member.gpus = next((m.gpus for m in reversed(gone) if m.gpus not in taken), "")
        staff.workers.add(member)
        text = f"{member.ident} takes a place on node {member.node[:8]}"
        staff.record.event("promoted", text, member=member.ident, node=member.node)


def _prepare(staff: Staff, usable: dict[str, int]) -> None:
    """Start one more standby, or a seat for a standby that was promoted."""
    for member in staff.workers.of(Life.READY):
        if is_standby(member.ident) and staff.seats.get(seat_of(member.ident)) is None:
            staff.start(staff.seats, member.node, staff.fleet.start_seat, seat_of(member.ident))
            return
    carried, working = staff.standbys.per_node(), staff.workers.per_node()
    for node in usable:
        if working.get(node, 0) and carried.get(node, 0) < staff.fleet.standbys:
            staff.start(staff.standbys, node, staff.fleet.start_standby)
            return


def _fill_keepers(staff: Staff, usable: dict[str, int]) -> None:
    """One keeper on every node."""
    carried = staff.keepers.per_node()
    for node in usable:
        if node not in carried:
            staff.start(staff.keepers, node, staff.fleet.start_keeper)


def _fill_loaders(staff: Staff, usable: dict[str, int]) -> None:
    """Start missing loaders, each on the node with the fewest: the loss of one node must not take all."""
    staying = staff.ground.staying
    counted = [m for m in staff.loaders.of(Life.STARTING, Life.READY) if m.node not in staff.ground.leaving]
    for _ in range(staff.job.data.loaders - len(counted)):
        if not staying:
            return
        carried = staff.loaders.per_node()
        # Better on a node under suspicion than two on one node, or none at all.
        node = min(staying, key=lambda name: (carried.get(name, 0), name not in usable, name))
        staff.start(staff.loaders, node, staff.fleet.start_loader)
