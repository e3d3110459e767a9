"""The end of a generation: what it means for the job."""

from __future__ import annotations

from collections.abc import Callable

from planaria.control import journal
from planaria.control import policies as policy
from planaria.control.causes import ENVIRONMENT_KINDS, FATAL_KINDS, root_cause
from planaria.control.desk import Desk
from planaria.control.failure import JobFailed
from planaria.control.generation import Generation
from planaria.control.policies.states import State
from planaria.control.status import generation_row
from planaria.runtime.outcome import End, Outcome


def conclude(desk: Desk, generation: Generation, wait: Callable[[], None]) -> bool:
    """Look back at a generation that ended; True if the job is over.

    Args:
        desk: the controller's.
        generation: the one that ended.
        wait: takes events in for a moment.

    Raises:
        JobFailed: the job cannot go on.
    """
    desk.view.generations = [generation_row(item) for item in desk.generations]
    ends = {outcome.end for outcome in generation.outcomes.values()}
    broken = bool(generation.lost or generation.hung) or not ends.isdisjoint({End.FAILED, End.ABORTED})
    if broken or not (ends == {End.PAUSED} or _saved_at_end(desk, generation, wait)):
        _conclude_broken(desk, generation)
        return False
    _judge(desk, policy.Generation(generation.number, generation.highest), generation)
    if ends <= {End.FINISHED, End.STOPPED}:
        desk.chronicle.settle(generation, generation.step)
    if ends == {End.FINISHED}:
        desk.enter(State.FINISHED)
        desk.record.event("finished", f"all {desk.job.train.steps} steps done", step=generation.step)
        return True
    if ends == {End.STOPPED} and desk.stop is not None:
        desk.enter(State.STOPPED)
        desk.record.event("stopped", f"stopped before step {generation.step}: {desk.stop}", step=generation.step)
        return True
    desk.cause, desk.planned = generation.pause_cause or "resize", True
    return False


def _saved_at_end(desk: Desk, generation: Generation, wait: Callable[[], None]) -> bool:
    """Wait for the checkpoints that are under way; False if a keeper took the last one with it.

    Raises:
        JobFailed: the last state cannot be saved.
    """
    while desk.custody.pending(generation):
        wait()
    wanted = generation.outcomes[generation.members[0]].end is End.STOPPED or desk.job.checkpoint.at_end
    problem = generation.problems.get(generation.step)
    if not wanted or problem is None:
        return True
    if generation.lost:
        return False
    raise JobFailed(f"the last state, of step {generation.step}, could not be saved: {problem}")


def _conclude_broken(desk: Desk, generation: Generation) -> None:
    """Decide whether to go on after a failure; raises JobFailed if not."""
    evidence = generation.lost | ({"all workers": generation.hung} if generation.hung else {})
    root = root_cause(generation.outcomes, evidence)
    error = policy.UserError(root.kind or "Exception", root.error or "") if root is not None else None
    if root is not None:
        text = f"{root.kind}: {root.error}"
        desk.record.event("error", text, gen=generation.number, step=generation.step, trace=root.trace)
    cause = str(error) if error else "; ".join(f"{who}: {why}" for who, why in evidence.items())
    if root is not None and root.kind in ("CheckpointDamaged", "CheckpointError"):
        _checkpoint_error(desk, root)
        error = None  # the next attempt starts from another checkpoint, so the same error may mean another one
    elif root is not None and root.kind in ENVIRONMENT_KINDS:
        error = None
    elif root is not None and root.kind in FATAL_KINDS:
        raise JobFailed(root.error or str(root.kind), root.trace)
    failure = policy.Failure(cause, generation.step, error)
    _judge(desk, policy.Generation(generation.number, generation.highest, failure), generation)
    decision = policy.FailurePolicy(desk.job.elastic.max_failures).decide(desk.history)
    if isinstance(decision, policy.GiveUp):
        raise JobFailed(decision.reason, root.trace if root is not None else None)
    # Of a node that is gone the workers are worth naming; its keeper only where it went alone.
    gone = sorted(generation.lost)
    gone = [ident for ident in gone if not desk.staff.is_keeper(ident)] or gone
    lost = f"lost {', '.join(gone)}" if gone else ""
    desk.cause, desk.planned = generation.hung or lost or str(error or cause)[:100], False


def _judge(desk: Desk, judged: policy.Generation, generation: Generation) -> None:
    desk.history.append(judged)
    desk.record.journal(journal.ended_row(judged, generation.step))


def _checkpoint_error(desk: Desk, root: Outcome) -> None:
    if "restore" in root.phases:  # it had been read; so it is the keeping that failed
        raise JobFailed(root.error or "the state could not be kept", root.trace)
    desk.custody.damaged(root.error or "")
