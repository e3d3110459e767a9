"""The controller: hears events, asks the policies, and acts. One thread, one queue, one state.

The way of a fault: evidence -> abort -> plan -> form -> restore -> first step. Surviving processes live
through all of it; only the processes that vanished, or did not answer in time, are replaced.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import ray

from planaria.config import JobConfig
from planaria.control import journal
from planaria.control import policies as policy
from planaria.control.causes import ENVIRONMENT_KINDS, FATAL_KINDS, root_cause
from planaria.control.chronicle import Chronicle
from planaria.control.custody import Custody, step_of, where
from planaria.control.events import Event, Gone, NodesSeen, Said, Saved, Started, StopAsked
from planaria.control.failure import JobFailed
from planaria.control.generation import Generation
from planaria.control.journal import Past
from planaria.control.members import Life, Member
from planaria.control.observations import Observations
from planaria.control.policies.drain import Leave, Stay, drain
from planaria.control.policies.hang import Hang
from planaria.control.policies.numerics import RollBack
from planaria.control.policies.quarantine import Fault
from planaria.control.policies.states import TRANSITIONS, State, check
from planaria.control.stacks import write_stacks
from planaria.control.staff import Staff
from planaria.control.status import Status, generation_row
from planaria.control.ticket import Ticket
from planaria.data.skips import without_steps
from planaria.memory.recall import MemorySource
from planaria.observe.record import RunRecord
from planaria.planner.plan import ModelFacts, PlanError, plan
from planaria.recipe import Recipe
from planaria.runtime.beacon_server import BeaconServer
from planaria.runtime.fleet import Fleet, NodeWatch, Scaling
from planaria.runtime.groups import Rendezvous, host_store
from planaria.runtime.outcome import End, Outcome, outcome_of
from planaria.runtime.worker import Order
from planaria.state.errors import CheckpointError

SETTLE_S = 10.0
"""A starting job waits this long for one more worker before it begins below its maximum."""
TICK_S = 0.25
ADOPT_S = 10.0
"""A process that takes longer to answer a controller that has returned counts as lost."""


class Controller:
    """Body of the controller's Ray actor: :meth:`run` is the job, the other methods answer meanwhile."""

    def __init__(
        self, job: JobConfig, recipe: Recipe, facts: ModelFacts, run_dir: str, scaling: Scaling, ticket: Ticket
    ) -> None:
        self.job, self.facts, self.run_dir, self.ticket = job, facts, run_dir, ticket
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.record = RunRecord(run_dir)
        self.record.job(job.model_dump(mode="json"))
        self.host = ray.util.get_node_ip_address()
        self.beacon = BeaconServer(
            self.host,
            ticket.secret,
            lambda ident, message: self.events.put(Said(ident, message)),
            lambda ident: self.events.put(Gone(ident, "its process ended")),
        )
        self.fleet = Fleet(job, recipe, run_dir, scaling, self.beacon.address, ticket.namespace)
        # One store for all generations, hosted by no rank, so that no rank's death can take it down.
        self.store = host_store(self.host)
        self.staff = Staff(job, self.fleet, self.record, self.events.put)
        self.state = State.WAITING
        self.generations: list[Generation] = []
        self.history: list[policy.Generation] = []
        self.view = Status(total_steps=job.train.steps)
        self.custody = Custody(job, run_dir, self.record, self.view, self.staff.keeper_addresses, self.events.put)
        self.chronicle = Chronicle(job, self.record, self.view, self.generations, self._begun)
        self._stop: str | None = None
        self._driverless = False
        self._cause, self._planned = "start", True
        self._change_at: float | None = None
        self._began = time.time()
        self._driver_at = self._entered_at = time.monotonic()
        self._rollback: RollBack | None = None
        self._agreed = 0
        """Steps done when replicas were last found equal."""
        self._undecided: set[int] = set()
        """States that were gone back to because of replicas that differ, without a culprit."""
        self.seen = Observations(job)
        # Detached, it would stay for ever if nobody called for it: after its return, or after the end of the job.
        self._idle = self._leave_if_idle()

    # -- called through Ray ------------------------------------------------------------------------

    def stop(self, why: str) -> None:
        """Ask for an end at the next step boundary, with a checkpoint."""
        self.events.put(StopAsked(why))

    def status(self) -> dict[str, Any]:
        """What the live view shows; plain values. That somebody asks is the sign that the driver lives."""
        self._driver_at = time.monotonic()
        view = self.view
        view.goodput = self.chronicle.account.view(self._driver_at)
        view.state, view.last_event = self.state.value, self.record.last_event
        view.workers = len(self.generations[-1].members) if self.generations else 0
        view.ready = sum(1 for _ in self.staff.workers.of(Life.READY))
        return view.as_dict()

    def run(self) -> dict[str, Any]:
        """The whole job; returns its summary. A failure of the job is told in ``summary["error"]``, not raised."""
        self._idle.cancel()
        watch = NodeWatch(self.fleet, lambda *seen: self.events.put(NodesSeen(*seen)), self.staff.trust.suspects)
        failure: Exception | None = None
        try:
            rows = self.record.rows("journal")
            past = journal.read(rows, self.ticket.run_id)
            self.custody.leave_out(journal.skips(rows))
            self.record.journal(journal.run_row(self.ticket.run_id, self._began, self.record.sizes()))
            self.custody.claim(f"{self.job.name} on {self.host}")
            self.fleet.demand(self.job.elastic.max_workers)
            self._drive(self._return(past) if past is not None else None)
        except (JobFailed, PlanError, CheckpointError) as error:
            failure = error
            self._enter(State.FAILED)
            self.record.event("failed", str(error))
        finally:
            watch.close()
            self.fleet.demand(0)
            self.staff.end_all()
            self.beacon.close()  # whoever could not be reached ends itself
        summary = self._summary(failure)
        self.record.summary(summary)
        self.record.close()
        self._idle = self._leave_if_idle()
        return summary

    def _leave_if_idle(self) -> threading.Timer:
        controller = ray.get_runtime_context().current_actor
        timer = threading.Timer(self.job.elastic.orphan_s, lambda: ray.kill(controller, no_restart=True))
        timer.daemon = True
        timer.start()
        return timer

    # -- the job -----------------------------------------------------------------------------------

    def _drive(self, generation: Generation | None) -> None:
        """Generation after generation, from the one that runs, if one does."""
        while True:
            if generation is None:
                self._await_workers()
                if self._stop is not None and not self._unsaved():
                    self._enter(State.STOPPED)
                    self.record.event("stopped", f"stopped while no generation was running: {self._stop}")
                    return
                generation = self._launch()
            self._supervise(generation)
            if self._conclude(generation):
                return
            generation = None

    def _return(self, past: Past) -> Generation | None:
        """Take up what an earlier life of this controller left: its processes, and the generation that they run."""
        self.generations[:], self.history[:] = past.generations, past.history
        generation = past.unfinished
        self.record.event("returned", "the controller was lost and has returned", members=len(past.members))
        self._began = past.began
        self.custody.returned(generation)
        self.chronicle.returned(past.sizes)
        self.staff.adopt(past, self.beacon.address)
        if generation is not None:
            self.view.generations = [generation_row(item) for item in self.generations]
            self._enter(State.RUNNING if generation.first_step_at is not None else State.FORMING)
        deadline = time.monotonic() + ADOPT_S
        while (silent := self.staff.starting()) and time.monotonic() < deadline:
            self._hear(generation, TICK_S)
        for ident in silent:
            self._lose(ident, generation, f"did not answer the returned controller within {ADOPT_S:.0f} s")
        if generation is None:
            return None
        for ident in generation.members:
            member = self.staff.workers.get(ident)
            if member is None or member.life is not Life.READY:
                generation.lost.setdefault(ident, "it ended while the controller was away")
            elif member.generation < generation.number:
                # Its order was never sent, so that it plays no part in a generation that others may have begun.
                generation.outcomes[ident] = Outcome(End.ABORTED, generation.start_step)
        return generation

    def _await_workers(self) -> None:
        """Return once a generation can be formed, or a stop was asked for."""
        limits, began, announced = self.job.elastic, time.monotonic(), False
        while self._stop is None or self._unsaved():
            self.staff.fill()
            self._release(None)
            ready, now = len(self.staff.slots()), time.monotonic()
            # After a fault nobody is waited for who may come: survivors go on at once, and grow later.
            settle = 0.0 if self.generations or self.staff.settled() else SETTLE_S
            decision = policy.wait(
                ready,
                now - began,
                limits,
                settle_s=settle,
                quiet_s=now - self.staff.last_arrival,
                data=bool(self.generations or self.staff.loader_handles()),
            )
            if isinstance(decision, policy.Start):
                return
            if isinstance(decision, policy.GiveUp) and self._stop is not None:
                self.generations[-1].pause_cause = ""  # what was not saved cannot be, any more
                return
            if isinstance(decision, policy.GiveUp):
                places = sum(self.staff.capacity.values())
                trouble = f"; the last start that failed: {self.staff.trouble}" if self.staff.trouble else ""
                raise JobFailed(f"{decision.reason} (the cluster has places for {places}{trouble})")
            if self.generations and not announced and ready < limits.min_workers:
                announced = True
                self._enter(State.WAITING)
                self.record.event(
                    "waiting",
                    f"{ready} of at least {limits.min_workers} workers left; waiting up to {limits.wait_s:g} s",
                )
            self._hear(None, TICK_S)

    def _unsaved(self) -> bool:
        """Whether the newest state is in memory alone, since all had paused when the job was asked to stop."""
        last = self.generations[-1] if self.generations else None
        return last is not None and bool(last.pause_cause) and last.step != self.view.checkpoint_step

    def _launch(self) -> Generation:
        """Plan and start the next generation."""
        self._enter(State.FORMING)
        began = time.monotonic()
        last = self.generations[-1] if self.generations else None
        chosen = plan(
            self.staff.slots(),
            self.job.layout,
            self.facts,
            self.job.train.global_batch,
            last.plan if last else None,
        )
        number = len(self.generations) + 1
        keepers = self.staff.keeper_addresses()
        self._go_back()
        source = self.custody.newest()
        step = step_of(source)
        generation = Generation(number, chosen, self._cause, self._planned, step, self._change_at, step=step)
        if last is not None:
            self.chronicle.settle(last, step)
            generation.phases |= last.ending
            if step < last.step:
                self.record.event(
                    "rollback",
                    f"steps {step} to {last.step - 1} are redone from {where(source)}",
                    gen=number,
                    steps_lost=last.step - step,
                )
        self.generations.append(generation)
        self.record.event(
            "generation",
            f"generation {number} ({self._cause}): {chosen.reason}; from {where(source)}",
            gen=number,
            layout=str(chosen.layout),
            workers=list(chosen.ranks),
            spares=list(chosen.spares),
            step=step,
            cause=self._cause,
            source="memory" if isinstance(source, MemorySource) else "start" if source is None else "checkpoint",
        )
        generation.phases["plan"] = time.monotonic() - began
        loaders = self.staff.loader_handles()
        nodes = tuple(self._member(ident).node for ident in chosen.ranks)
        generation.nodes, generation.token = nodes, f"{self.ticket.run_id}-{number}"
        self.record.journal(journal.generation_row(generation))
        durable = None if isinstance(source, MemorySource) else source
        # Longer than a hang may last, so that it is judged by what all ranks say, before a collective gives up.
        timeout_s = 1.5 * self.job.elastic.hang_s + 5.0
        for rank, ident in enumerate(chosen.ranks):
            rendezvous = Rendezvous(number, rank, chosen.layout, self.host, self.store.port, timeout_s)
            strict = number == 1
            self._order(
                ident,
                Order(
                    rendezvous,
                    generation.token,
                    loaders,
                    nodes,
                    keepers[nodes[rank]],
                    step,
                    source,
                    durable,
                    strict,
                    skips=self.custody.windows,
                    gpus=self._member(ident).gpus,
                ),
            )
        self.custody.begun(generation, source)
        self.chronicle.account.begin(step, time.monotonic())
        return generation

    def _go_back(self) -> None:
        """Give up the newest states, if they are no good."""
        back, self._rollback = self._rollback, None
        if back is None:
            return
        self.custody.rewind(back.to_step, len(self.generations))
        text = f"going back to step {back.to_step}"
        if back.first <= back.last:
            windows = without_steps(self.custody.windows, back.first, back.last)
            self.custody.leave_out(windows)
            self.record.journal(journal.skips_row(windows))
            text += f"; the data of steps {back.first} to {back.last}, whose gradients were not finite, are left out"
        self.record.event("rewind", text, to_step=back.to_step, windows=self.custody.windows)

    def _member(self, ident: str) -> Member:
        member = self.staff.workers.get(ident)
        assert member is not None
        return member

    def _order(self, ident: str, order: Order) -> None:
        member = self._member(ident)

        def done(future: Any) -> None:
            error = future.exception()
            if error is not None:
                self.events.put(Gone(ident, f"{type(error).__name__}: {_first_line(error)}"))

        member.handle.run.options(concurrency_group="train").remote(order).future().add_done_callback(done)

    def _supervise(self, generation: Generation) -> None:
        """Return when every member has returned or vanished."""
        while generation.pending:
            self._hear(generation, TICK_S)
            failed = any(o.end in (End.FAILED, End.ABORTED) for o in generation.outcomes.values())
            if generation.lost or failed or self._hung(generation):
                self._abort(generation)
                return
            self.staff.fill(calm=self.state is State.RUNNING)
            self._release(generation)
            self._steer(generation)

    def _steer(self, generation: Generation) -> None:
        """Change what a healthy generation does, if it is time."""
        if self._stop is not None and self.state is not State.STOPPING:
            self._enter(State.STOPPING)
            self._tell_members(generation, "request", generation.number, stop=True)
        elif self.state is not State.RUNNING:
            return
        elif self._rollback is not None:
            self._pause(generation, State.RESIZING, f"going back to step {self._rollback.to_step}")
        elif quitting := sorted(self.staff.quitting & set(generation.members)):
            self._leave(generation, f"{', '.join(quitting)} told to end", len(self.staff.slots()))
        elif isinstance(move := self._drain(generation), Leave):
            self._leave(generation, f"{', '.join(move.members)}: {move.why}", move.left)
        elif isinstance(move, policy.Pause):
            self._leave(generation, f"{', '.join(move.members)} told to end", move.workers)
        elif self._should_grow(generation):
            self._pause(generation, State.RESIZING, "more workers are ready: changing size at the next step")

    def _drain(self, generation: Generation) -> Stay | Leave | policy.Pause:
        running: dict[str, list[str]] = {}
        for ident in generation.members:
            running.setdefault(self._member(ident).node, []).append(ident)
        spares: dict[str, list[str]] = {}
        for slot in self.staff.slots():
            if slot.id not in generation.members:
                spares.setdefault(slot.node, []).append(slot.id)
        steps, now = self.seen.step_s, time.monotonic()
        return drain(self.staff.leaving, running, spares, steps, now, self.job.elastic, self.custody.save_s)

    def _leave(self, generation: Generation, who: str, left: int) -> None:
        too_few = left < self.job.elastic.min_workers
        then = "the state is saved, then the job waits for others" if too_few else f"going on with {left}"
        self._pause(generation, State.DRAINING, f"{who}; {then}", save=too_few)

    def _pause(self, generation: Generation, state: State, text: str, *, save: bool = False) -> None:
        """Have all workers leave the generation at their next step boundary; no step is lost."""
        self._enter(state)
        self.record.event("resize" if state is State.RESIZING else "drain", text, gen=generation.number)
        self._change_at, generation.pause_cause = time.monotonic(), state.value
        # A state that is to outlive all memory is saved as at a stop.
        self._tell_members(generation, "request", generation.number, **{"stop" if save else "pause": True})

    def _release(self, generation: Generation | None) -> None:
        """End what is left on nodes under notice, as soon as nobody needs it: they shall not wait for their deadline.

        Args:
            generation: the one that runs, if one does.
        """
        staff, at_work, needed = self.staff, set[str](), set(self.staff.leaving)
        if generation is not None:
            at_work = set(generation.members)
            needed = set(generation.nodes) if generation.covered else needed
        elif not self.generations or self.generations[-1].step == self.view.checkpoint_step:
            needed = set()  # the state is durable
        for member in staff.on_nodes(staff.leaving):
            kept = staff.is_keeper(member.ident) and (member.node in needed or self.custody.needs(member.node))
            if member.ident not in at_work and not kept and staff.dispensable(member.ident):
                self._dismiss(member.ident, "its node is to leave", generation)
        for ident in staff.quitting - at_work:
            staff.quitting.discard(ident)
            self._dismiss(ident, "it was told to end", generation)

    def _dismiss(self, ident: str, why: str, generation: Generation | None) -> None:
        if self.staff.dismiss(ident, why):
            self.beacon.cut(ident)
            member = self.staff.keepers.get(ident)
            if self.staff.is_loader(ident):
                self._tell_loaders(generation)
            elif member is not None:
                self.custody.keeper_lost(member.node)

    def _hung(self, generation: Generation) -> bool:
        """Whether a member says nothing any more, or all talk but none gets ahead."""
        self._lose_silent(generation)
        hang = self.seen.hang(generation, self.beacon.silence, time.monotonic())
        if hang is not None:
            self._hang(generation, hang)
        return bool(generation.lost or generation.hung)

    def _lose_silent(self, generation: Generation) -> None:
        """Give up whoever has not been heard of for too long."""
        silence = {m.ident: (m.node, self.beacon.silence(m.ident)) for m in self.staff.ready()}
        limit = self.job.elastic.silence_s
        cut_off = {node for node, silent in silence.values() if silent is not None and silent > limit}
        for ident, (node, silent) in silence.items():
            # The processes of a node that is cut off fall silent together, though their last words came up to one
            # heartbeat apart: none is waited for alone.
            if silent is not None and silent > (limit / 2 if node in cut_off else limit):
                generation.silent_since = time.monotonic() - silent
                self._lose(ident, generation, f"silent for {silent:.1f} s")

    def _hang(self, generation: Generation, hang: Hang) -> None:
        """Write down where everybody stands, and remove whoever holds the others up."""
        generation.hung, generation.silent_since = hang.why, generation.last_step_at
        culprits = [generation.members[rank] for rank in hang.culprits]
        handles = {ident: self._member(ident).handle for ident in generation.pending}
        path = write_stacks(handles, f"{self.run_dir}/stacks/gen-{generation.number}-{hang.kind}.txt")
        text = f"{hang.why}; where everybody stood: {path}"
        fields = {"step": hang.step, "phase": hang.phase, "culprits": culprits, "shape": hang.kind}
        self.record.event("hang", text, gen=generation.number, **fields)
        for ident in culprits:
            self.staff.blame(self._member(ident).node, Fault.HANG, f"{ident}: {hang.why}")
            self._lose(ident, generation, hang.why)

    def _abort(self, generation: Generation) -> None:
        """End a broken generation everywhere; whoever does not return in time is ended and counted as lost."""
        self._change_at = evidence = time.monotonic()
        self.chronicle.account.fault(evidence, generation.silent_since)
        self._enter(State.RECOVERING)
        for ident, why in list(generation.lost.items())[:1]:
            self.record.event("fault", f"{ident}: {why}", gen=generation.number, member=ident, step=generation.step)
        self._tell_members(generation, "abort", generation.number)
        deadline = evidence + self.job.elastic.abort_s
        while generation.pending and (left := deadline - time.monotonic()) > 0:
            self._hear(generation, min(TICK_S, left))
            self._lose_silent(generation)
        for ident in generation.pending:
            # Fencing: two generations must never train at once, so a process that does not answer is ended
            # before the next one is formed.
            self._lose(ident, generation, f"did not leave generation {generation.number} in time")
        generation.ending["abort"] = time.monotonic() - evidence

    def _conclude(self, generation: Generation) -> bool:
        """Look back at a generation that ended; True if the job is over."""
        self.view.generations = [generation_row(item) for item in self.generations]
        ends = {outcome.end for outcome in generation.outcomes.values()}
        if generation.lost or generation.hung or End.FAILED in ends or End.ABORTED in ends:
            self._conclude_broken(generation)
            return False
        if not (ends == {End.PAUSED} or self._saved_at_end(generation)):
            self._conclude_broken(generation)
            return False
        self._judge(policy.Generation(generation.number, generation.highest), generation)
        if ends <= {End.FINISHED, End.STOPPED}:
            self.chronicle.settle(generation, generation.step)
        if ends == {End.FINISHED}:
            self._enter(State.FINISHED)
            self.record.event("finished", f"all {self.job.train.steps} steps done", step=generation.step)
            return True
        if ends == {End.STOPPED} and self._stop is not None:
            self._enter(State.STOPPED)
            self.record.event("stopped", f"stopped before step {generation.step}: {self._stop}", step=generation.step)
            return True
        self._cause, self._planned = {"draining": "drain"}.get(generation.pause_cause, "resize"), True
        return False

    def _saved_at_end(self, generation: Generation) -> bool:
        """Wait for the checkpoints that are under way; False if a keeper took the last one with it.

        Raises:
            JobFailed: the last state cannot be saved.
        """
        while self.custody.pending(generation):
            self._hear(generation, TICK_S)
        wanted = generation.outcomes[generation.members[0]].end is End.STOPPED or self.job.checkpoint.at_end
        problem = generation.problems.get(generation.step)
        if not wanted or problem is None:
            return True
        if generation.lost:
            return False
        raise JobFailed(f"the last state, of step {generation.step}, could not be saved: {problem}")

    def _conclude_broken(self, generation: Generation) -> None:
        """Decide whether to go on after a failure; raises JobFailed if not."""
        evidence = generation.lost | ({"all workers": generation.hung} if generation.hung else {})
        root = root_cause(generation.outcomes, evidence)
        error = policy.UserError(root.kind or "Exception", root.error or "") if root is not None else None
        if root is not None:
            text = f"{root.kind}: {root.error}"
            self.record.event("error", text, gen=generation.number, step=generation.step, trace=root.trace)
        cause = str(error) if error else "; ".join(f"{who}: {why}" for who, why in evidence.items())
        if root is not None and root.kind in ("CheckpointDamaged", "CheckpointError"):
            self._checkpoint_error(root)
            error = None  # the next attempt starts from another checkpoint, so the same error may mean another one
        elif root is not None and root.kind in ENVIRONMENT_KINDS:
            error = None
        elif root is not None and root.kind in FATAL_KINDS:
            raise JobFailed(root.error or str(root.kind), root.trace)
        failure = policy.Failure(cause, generation.step, error)
        self._judge(policy.Generation(generation.number, generation.highest, failure), generation)
        decision = policy.FailurePolicy(self.job.elastic.max_failures).decide(self.history)
        if isinstance(decision, policy.GiveUp):
            raise JobFailed(decision.reason, root.trace if root is not None else None)
        # Of a node that is gone the workers are worth naming; its keeper only where it went alone.
        gone = sorted(generation.lost)
        gone = [ident for ident in gone if not self.staff.is_keeper(ident)] or gone
        lost = f"lost {', '.join(gone)}" if gone else ""
        self._cause = generation.hung or lost or str(error or cause)[:100]
        self._planned = False

    def _judge(self, judged: policy.Generation, generation: Generation) -> None:
        self.history.append(judged)
        self.record.journal(journal.ended_row(judged, generation.step))

    def _checkpoint_error(self, root: Outcome) -> None:
        if "restore" in root.phases:  # it had been read; so it is the keeping that failed
            raise JobFailed(root.error or "the state could not be kept", root.trace)
        self.custody.damaged(root.error or "")

    # -- hearing and telling -----------------------------------------------------------------------

    def _hear(self, generation: Generation | None, timeout_s: float) -> None:
        """Take events until the queue is empty, waiting ``timeout_s`` for the first."""
        self._heed_driver()
        try:
            event = self.events.get(timeout=timeout_s)
        except queue.Empty:
            return
        while True:
            self._take(event, generation)
            try:
                event = self.events.get_nowait()
            except queue.Empty:
                return

    def _take(self, event: Event, generation: Generation | None) -> None:
        match event:
            case Said(ident, message) if self.staff.is_keeper(ident):
                member = self.staff.keepers.get(ident)
                # Not only once it is ready: what it says again to a controller that returned may come before its hello.
                if member is not None and member.life is not Life.LOST:
                    self.custody.keeper_said(member.node, message)
            case Said(ident, {"t": "notice", "why": why}):
                self.record.event("notice", f"{ident} was told to end: {why}", member=ident)
                self.staff.quitting.add(ident)
            case Said(ident, message):
                self.chronicle.take(ident, message)
                current = generation is not None and message.get("gen") == generation.number
                if generation is not None and current and ident not in generation.lost:
                    self._worker_said(ident, generation, message)
            case Saved():
                self.custody.saved(event, self.generations)
            case Gone(ident, why):
                self._lose(ident, generation, why)
            case Started():
                if self.staff.started(event):
                    if self.staff.is_loader(event.ident):
                        self._tell_loaders(generation)
                    elif self.staff.is_keeper(event.ident):
                        self.custody.announce_ring()
            case NodesSeen(capacity, leaving):
                self.staff.notices(leaving)
                for ident, why in self.staff.nodes(capacity):
                    self._lose(ident, generation, why)
            case StopAsked(why):
                self._stop = self._stop or why

    def _worker_said(self, ident: str, generation: Generation, message: dict[str, Any]) -> None:
        now = time.monotonic()
        self.seen.heard(ident, self._member(ident).node, generation, message, now)
        self.custody.worker_said(generation, message)
        match message["t"]:
            case "end":
                generation.outcomes[ident] = outcome_of(message["outcome"])
            case "step" if message["rank"] == 0:
                generation.last_step_at = now
                self._look_back(generation, message)
            case "replicas":
                self._compare(generation, message)

    def _look_back(self, generation: Generation, message: dict[str, Any]) -> None:
        """A step is done: whether its numbers make sense, and who is slow."""
        if message["skipped"] and not message["overflow"] and self._rollback is None:
            decision = self.seen.numbers(message["step"] + 1, self.custody.states())
            if isinstance(decision, policy.GiveUp):
                raise JobFailed(decision.reason)
            if isinstance(decision, RollBack):
                self._rollback = decision
        before = {item.rank for item in self.seen.standing.stragglers}
        standing = self.seen.slow(generation)
        for item in standing.stragglers if standing else ():
            if item.rank not in before:
                text = f"rank {item.rank} on node {item.node[:8]} computes {item.ratio:.1f} times as long as the others"
                self.record.event("straggler", text, node=item.node, rank=item.rank, ratio=item.ratio)

    def _compare(self, generation: Generation, message: dict[str, Any]) -> None:
        """Replicas of the parameters were compared; whoever differs computes wrong numbers, and is removed."""
        for found in message["differ"]:
            odd = [generation.members[rank] for rank in found["odd"]]
            who = ", ".join(odd) or "nobody can say which"
            text = f"replicas of {found['group']} differ at step {message['step']}: {who}"
            fields = {"step": message["step"], "members": odd, "digests": found["digests"]}
            self.record.event("replicas_differ", text, gen=generation.number, **fields)
            # The numbers that were wrong have been in the gradients of all since some step after the last comparison.
            agreed = max((step for step in self.custody.states() if step <= self._agreed), default=0)
            if not odd and agreed in self._undecided:
                raise JobFailed(
                    f"{text}, and they differed before after going back to step {agreed}; with layout.dp_replicate of "
                    f"3 or more the one that is wrong can be told. Take out the nodes one by one: {generation.nodes}"
                )
            if not odd:
                self._undecided.add(agreed)
            self._rollback = self._rollback or RollBack(agreed, message["step"], message["step"] - 1)
            for ident in odd:
                self.staff.blame(self._member(ident).node, Fault.CHECKSUM, text)
                self._lose(ident, generation, text)
        if not message["differ"] and self._rollback is None:
            self._agreed = message["step"]

    def _lose(self, ident: str, generation: Generation | None, why: str) -> None:
        if not self.staff.lose(ident, why):
            return
        self.beacon.cut(ident)
        if self.staff.is_keeper(ident):
            self._keeper_lost(ident, generation, why)
        elif self.staff.is_loader(ident):
            self._tell_loaders(generation)
        elif generation is not None and ident in generation.pending:
            generation.lost[ident] = why
            self.seen.shrunk(time.monotonic())

    def _keeper_lost(self, ident: str, generation: Generation | None, why: str) -> None:
        """The memory of a node is gone. Ranks that kept their state there leave the generation, unharmed."""
        member = self.staff.keepers.get(ident)
        assert member is not None
        self.custody.keeper_lost(member.node)
        if generation is not None and member.node in generation.nodes:
            generation.lost[ident] = f"{why}, and with it the snapshots of node {member.node[:8]}"

    def _tell_loaders(self, generation: Generation | None) -> None:
        """Whom to ask for data; nobody, if none is left: each rank builds its own until there are loaders again."""
        if generation is not None:
            self._tell_members(generation, "set_loaders", generation.number, self.staff.loader_handles())

    def _tell_members(self, generation: Generation, method: str, *args: Any, **kwargs: Any) -> None:
        for ident in generation.pending:
            member = self.staff.workers.get(ident)
            if member is not None and member.life is Life.READY:
                getattr(member.handle, method).options(concurrency_group="control").remote(*args, **kwargs)

    def _heed_driver(self) -> None:
        """End the job, or not, if its driver is gone without having ended it."""
        away = time.monotonic() - self._driver_at
        if self._stop is None and not self._driverless and away > self.job.elastic.orphan_s:
            self._driverless = True
            ends = self.job.elastic.on_driver_loss == "stop"
            what = "the job ends with a checkpoint" if ends else "the job goes on"
            self.record.event("driver_lost", f"the driver has not asked for {away:.0f} s; {what}")
            if ends:
                self._stop = "the driver is gone"

    # -- the rest ----------------------------------------------------------------------------------

    def _should_grow(self, generation: Generation) -> bool:
        """Whether a plan over all ready workers would use more of them than work now."""
        slots = self.staff.slots()
        if len(slots) <= len(generation.members):
            self.seen.calm(0.0, more=False, now=time.monotonic())
            return False
        usable = plan(slots, self.job.layout, self.facts, self.job.train.global_batch, generation.plan)
        now, more = time.monotonic(), len(usable.ranks) > len(generation.members)
        calm = self.seen.calm(now - self.staff.last_change, more, now)
        decision = policy.resize(len(generation.members), len(usable.ranks), self.job.elastic, calm=calm)
        return isinstance(decision, policy.Grow)

    def _begun(self) -> None:
        """A generation completed its first step."""
        generation = self.generations[-1]
        self.record.journal(journal.first_step_row(generation))
        grown = len(self.generations) > 1 and len(generation.members) > len(self.generations[-2].members)
        self.seen.changed(generation, grown=grown, now=time.monotonic())
        if self.state is State.FORMING:
            self._enter(State.RUNNING)

    def _enter(self, state: State) -> None:
        if state is not self.state:
            check(self.state, state)
            now = time.monotonic()
            cause = TRANSITIONS.get((self.state, state), "")
            self.record.transition(self.state, state, cause, now - self._entered_at)
            self.chronicle.account.enter(state.value, now)
            self.state, self._entered_at = state, now

    def _summary(self, failure: Exception | None) -> dict[str, Any]:
        step, path = self.custody.durable()
        return {
            "name": self.job.name,
            "state": self.state.value,
            "error": None if failure is None else str(failure),
            "trace": getattr(failure, "trace", None),
            "stopped_by": self._stop,
            "steps": self.generations[-1].step if self.generations else 0,
            "loss": self.view.loss,
            "seconds": time.time() - self._began,
            "generations": [generation_row(item) for item in self.generations],
            "evaluation": self.chronicle.evaluation,
            "goodput": self.chronicle.account.view(time.monotonic()),
            "checkpoint_step": step,
            "checkpoint_path": path,
            "bad_samples": self.chronicle.bad_samples,
            "metrics": self.view.last,
            "run_dir": self.run_dir,
        }


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
