"""Who says nothing any more, and who holds the others up."""

from __future__ import annotations

import time

from planaria.control.desk import Desk
from planaria.control.generation import Generation
from planaria.control.losses import lose
from planaria.control.policies.hang import Hang
from planaria.control.policies.quarantine import Fault
from planaria.control.stacks import write_stacks


def hung(desk: Desk, generation: Generation) -> bool:
    """Whether a member says nothing any more, or all talk but none gets ahead; the culprits are lost then."""
    lose_silent(desk, generation)
    hang = desk.seen.hang(generation, desk.beacon.silence, time.monotonic())
    if hang is not None:
        _remove_culprits(desk, generation, hang)
    return bool(generation.lost or generation.hung)


def lose_silent(desk: Desk, generation: Generation) -> None:
    """Give up whoever has not been heard of for too long."""
    silence = {m.ident: (m.node, desk.beacon.silence(m.ident)) for m in desk.staff.ready()}
    limit = desk.job.elastic.silence_s
    cut_off = {node for node, silent in silence.values() if silent is not None and silent > limit}
    for ident, (node, silent) in silence.items():
        # The processes of a node that is cut off fall silent together, though their last words came up to one
        # heartbeat apart: none is waited for alone.
        if silent is not None and silent > (limit / 2 if node in cut_off else limit):
            generation.silent_since = time.monotonic() - silent
            lose(desk, ident, generation, f"silent for {silent:.1f} s")


def _remove_culprits(desk: Desk, generation: Generation, hang: Hang) -> None:
    """Write down where everybody stands, and remove whoever holds the others up."""
    generation.hung, generation.silent_since = hang.why, generation.last_step_at
    culprits = [generation.members[rank] for rank in hang.culprits]
    handles = {ident: desk.worker(ident).handle for ident in generation.pending}
    path = write_stacks(handles, f"{desk.run_dir}/stacks/gen-{generation.number}-{hang.kind}.txt")
    text = f"{hang.why}; where everybody stood: {path}"
    fields = {"step": hang.step, "phase": hang.phase, "culprits": culprits, "shape": hang.kind}
    desk.record.event("hang", text, gen=generation.number, **fields)
    for ident in culprits:
        desk.staff.ground.blame(desk.worker(ident).node, Fault.HANG, f"{ident}: {hang.why}")
        lose(desk, ident, generation, hang.why)
