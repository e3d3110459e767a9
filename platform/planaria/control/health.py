"""Whether what the ranks compute makes sense, who is slow, and the way back when numbers are wrong."""

from __future__ import annotations

from typing import Any

from planaria.control import journal
from planaria.control.desk import Desk
from planaria.control.failure import JobFailed
from planaria.control.generation import Generation
from planaria.control.losses import lose
from planaria.control.policies.decisions import GiveUp
from planaria.control.policies.numerics import RollBack
from planaria.control.policies.quarantine import Fault
from planaria.data.skips import without_steps

Message = dict[str, Any]


def look_back(desk: Desk, generation: Generation, message: Message) -> None:
    """A step is done: whether its numbers make sense, and who is slow.

    Raises:
        JobFailed: going back does not help.
    """
    if message["skipped"] and not message["overflow"] and desk.rollback is None:
        decision = desk.seen.numbers(message["step"] + 1, desk.custody.states())
        if isinstance(decision, GiveUp):
            raise JobFailed(decision.reason)
        if isinstance(decision, RollBack):
            desk.rollback = decision
    before = {item.rank for item in desk.seen.standing.stragglers}
    standing = desk.seen.slow(generation)
    for item in standing.stragglers if standing else ():
        if item.rank not in before:
            text = f"rank {item.rank} on node {item.node[:8]} computes {item.ratio:.1f} times as long as the others"
            desk.record.event("straggler", text, node=item.node, rank=item.rank, ratio=item.ratio)


def compare(desk: Desk, generation: Generation, message: Message) -> None:
    """Replicas of the parameters were compared; whoever differs computes wrong numbers, and is removed.

    Raises:
        JobFailed: nobody can say who is wrong, and going back did not help.
    """
    for found in message["differ"]:
        odd = [generation.members[rank] for rank in found["odd"]]
        who = ", ".join(odd) or "nobody can say which"
        text = f"replicas of {found['group']} differ at step {message['step']}: {who}"
        fields = {"step": message["step"], "members": odd, "digests": found["digests"]}
        desk.record.event("replicas_differ", text, gen=generation.number, **fields)
        # The numbers that were wrong have been in the gradients of all since some step after the last comparison.
        agreed = max((step for step in desk.custody.states() if step <= desk.agreed), default=0)
        if not odd and agreed in desk.undecided:
            raise JobFailed(
                f"{text}, and they differed before after going back to step {agreed}; with layout.dp_replicate of "
                f"3 or more the one that is wrong can be told. Take out the nodes one by one: {generation.nodes}"
            )
        if not odd:
            desk.undecided.add(agreed)
        desk.rollback = desk.rollback or RollBack(agreed, message["step"], message["step"] - 1)
        for ident in odd:
            desk.staff.ground.blame(desk.worker(ident).node, Fault.CHECKSUM, text)
            lose(desk, ident, generation, text)
    if not message["differ"] and desk.rollback is None:
        desk.agreed = message["step"]


def go_back(desk: Desk) -> None:
    """Give up the newest states, if they are no good."""
    back, desk.rollback = desk.rollback, None
    if back is None:
        return
    desk.custody.rewind(back.to_step, len(desk.generations))
    text = f"going back to step {back.to_step}"
    if back.first <= back.last:
        windows = without_steps(desk.custody.windows, back.first, back.last)
        desk.custody.leave_out(windows)
        desk.record.journal(journal.skips_row(windows))
        text += f"; the data of steps {back.first} to {back.last}, whose gradients were not finite, are left out"
    desk.record.event("rewind", text, to_step=back.to_step, windows=desk.custody.windows)
