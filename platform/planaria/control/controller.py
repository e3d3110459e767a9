"""The controller: hears events, asks the policies, and acts. One thread, one queue, one state.

The way of a fault: evidence -> abort -> plan -> form -> restore -> first step. Surviving processes live
through all of it; only the processes that vanished, or did not answer in time, are replaced.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import ray

from planaria.config import JobConfig, vault_root
from planaria.control import policies as policy
from planaria.control.causes import ENVIRONMENT_KINDS, FATAL_KINDS, root_cause
from planaria.control.chronicle import Chronicle
from planaria.control.drains import Drains
from planaria.control.events import Ended, Event, Gone, NodesSeen, Said, Saved, Started, StopAsked
from planaria.control.failure import JobFailed
from planaria.control.generation import Generation
from planaria.control.members import Life
from planaria.control.resume import Resume
from planaria.control.staff import Staff
from planaria.control.status import Status, generation_row
from planaria.memory.client import announce_ring, forget, newest_in_memory
from planaria.memory.recall import MemorySource
from planaria.memory.wire import KeeperAddress
from planaria.observe.record import RunRecord
from planaria.planner.plan import ModelFacts, PlanError, plan
from planaria.recipe import Recipe
from planaria.runtime.beacon import BeaconServer
from planaria.runtime.fleet import Fleet, NodeWatch, Scaling
from planaria.runtime.groups import Rendezvous, host_store
from planaria.runtime.outcome import End, Outcome
from planaria.runtime.worker import Order
from planaria.state.errors import CheckpointError
from planaria.state.vault import Vault

SETTLE_S = 10.0
"""A starting job waits this long for one more worker before it begins below its maximum."""
RESTORE_LIMIT_S = 1800.0
"""Longest time from forming to the first step, where ``elastic.hang_s`` is shorter."""
TICK_S = 0.25
HEAR_OUT_S = 1.0
"""Longest wait for the last reports of workers that have returned."""


class State(StrEnum):
    """Stations of a job."""

    WAITING = "waiting"
    FORMING = "forming"
    RUNNING = "running"
    RECOVERING = "recovering"
    RESIZING = "resizing"
    STOPPING = "stopping"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


class Controller:
    """Body of the controller's Ray actor: :meth:`run` is the job, the other methods answer meanwhile."""

    def __init__(self, job: JobConfig, recipe: Recipe, facts: ModelFacts, run_dir: str, scaling: Scaling) -> None:
        self.job, self.facts, self.run_dir = job, facts, run_dir
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.record = RunRecord(run_dir)
        self.record.job(job.model_dump(mode="json"))
        self.host = ray.util.get_node_ip_address()
        self.beacon = BeaconServer(
            self.host,
            secrets.token_hex(16),
            lambda ident, message: self.events.put(Said(ident, message)),
            lambda ident: self.events.put(Gone(ident, "its process ended")),
        )
        self.fleet = Fleet(job, recipe, run_dir, scaling, self.beacon.address)
        # One store for all generations, hosted by no rank, so that no rank's death can take it down.
        self.store = host_store(self.host)
        self.staff = Staff(job, self.fleet, self.record, self.events.put)
        root = vault_root(job, run_dir)
        self.vault = Vault(
            root,
            keep_last=job.checkpoint.keep_last,
            keep_every=job.checkpoint.keep_every,
            # What is committed was written from memory by processes that still live; reading all of it back, over
            # the network, for every checkpoint would cost more than it could find.
            verify_before_removal=False,
            on_problem=lambda problem: self.record.event("vault", problem),
        )
        self.resume = Resume(self.vault, job, root, self.record.event)
        self.drains = Drains(self.vault, self.events.put)
        self.state = State.WAITING
        self.generations: list[Generation] = []
        self.history: list[policy.Generation] = []
        self.view = Status(total_steps=job.train.steps)
        self.chronicle = Chronicle(job, self.record, self.view, self.generations, self._begun)
        self._stop: str | None = None
        self._cause, self._planned = "start", True
        self._change_at: float | None = None
        self._run_id = secrets.token_hex(4)
        self._started_at = time.monotonic()

    # -- called through Ray ------------------------------------------------------------------------

    def stop(self, why: str) -> None:
        """Ask for an end at the next step boundary, with a checkpoint."""
        self.events.put(StopAsked(why))

    def status(self) -> dict[str, Any]:
        """What the live view shows; plain values."""
        view = self.view
        view.state, view.last_event = self.state.value, self.record.last_event
        view.workers = len(self.generations[-1].members) if self.generations else 0
        view.ready = sum(1 for _ in self.staff.workers.of(Life.READY))
        return view.as_dict()

    def run(self) -> dict[str, Any]:
        """The whole job; returns its summary. A failure of the job is told in ``summary["error"]``, not raised."""
        watch = NodeWatch(self.fleet, lambda capacity: self.events.put(NodesSeen(capacity)), self.staff.trust.suspects)
        failure: Exception | None = None
        try:
            # From now on an earlier controller of this run that still lives, cut off somewhere, commits no more.
            self.vault.claim(f"{self.job.name} on {self.host}")
            self._drive()
        except (JobFailed, PlanError, CheckpointError) as error:
            failure = error
            self._enter(State.FAILED)
            self.record.event("failed", str(error))
        finally:
            watch.close()
            self.staff.end_all()
            self.beacon.close()
        summary = self._summary(failure)
        self.record.summary(summary)
        self.record.close()
        return summary

    # -- the job -----------------------------------------------------------------------------------

    def _drive(self) -> None:
        while True:
            self._await_workers()
            if self._stop is not None:
                self._enter(State.STOPPED)
                self.record.event("stopped", f"stopped while no generation was running: {self._stop}")
                return
            generation = self._launch()
            self._supervise(generation)
            self._hear_out(generation)
            if self._conclude(generation):
                return

    def _await_workers(self) -> None:
        """Return once a generation can be formed, or a stop was asked for."""
        limits, began, announced = self.job.elastic, time.monotonic(), False
        while self._stop is None:
            self.staff.fill()
            ready, now = len(self.staff.slots()), time.monotonic()
            # After a fault nobody is waited for who may come: survivors go on at once, and grow later.
            settle = 0.0 if self.generations or self.staff.settled() else SETTLE_S
            decision = policy.wait(
                ready,
                now - began,
                limits,
                settle_s=settle,
                quiet_s=now - self.staff.last_arrival,
                loaders=len(self.staff.loader_handles()),
            )
            if isinstance(decision, policy.Start):
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
        source = self._newest_state(keepers)
        step = source.step if isinstance(source, MemorySource) else source or 0
        generation = Generation(number, chosen, self._cause, self._planned, step, self._change_at, step=step)
        if last is not None:
            generation.phases |= last.ending
            if step < last.step:
                self.record.event(
                    "rollback",
                    f"steps {step} to {last.step - 1} are redone from {_where(source)}",
                    gen=number,
                    steps_lost=last.step - step,
                )
        self.generations.append(generation)
        self.record.event(
            "generation",
            f"generation {number} ({self._cause}): {chosen.reason}; from {_where(source)}",
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
        nodes = tuple(self._node_of(ident) for ident in chosen.ranks)
        generation.nodes, generation.token = nodes, f"{self._run_id}-{number}"
        durable = None if isinstance(source, MemorySource) else source
        for rank, ident in enumerate(chosen.ranks):
            rendezvous = Rendezvous(number, rank, chosen.layout, self.host, self.store.port, self.job.elastic.hang_s)
            strict = number == 1
            self._order(
                ident,
                Order(
                    rendezvous, generation.token, loaders, nodes, keepers[nodes[rank]], step, source, durable, strict
                ),
            )
        # What neither this generation nor a fault in its first step can need.
        kept = (source.generation, source.step) if isinstance(source, MemorySource) else (None, None)
        self._in_background(forget, list(keepers.values()), number, *kept)
        return generation

    def _newest_state(self, keepers: dict[str, KeeperAddress]) -> MemorySource | int | None:
        """The newest state that memory covers completely, or the step of a newer checkpoint that is intact."""
        saved = self.view.checkpoint_step
        source = newest_in_memory(keepers.values())
        if source is not None and (saved is None or saved <= source.step):
            return source
        return self.resume.step(saved)

    def _node_of(self, ident: str) -> str:
        member = self.staff.workers.get(ident)
        assert member is not None
        return member.node

    def _in_background(self, function: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=function, args=args, daemon=True).start()

    def _order(self, ident: str, order: Order) -> None:
        member = self.staff.workers.get(ident)
        assert member is not None

        def done(future: Any) -> None:
            error = future.exception()
            if error is None:
                self.events.put(Ended(ident, order.rendezvous.generation, future.result()))
            else:
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
            self.staff.fill()
            if self._stop is not None and self.state is not State.STOPPING:
                self._enter(State.STOPPING)
                self._tell_members(generation, "request", generation.number, stop=True)
            elif self.state is State.RUNNING and not generation.pause_asked and self._should_grow(generation):
                generation.pause_asked = True
                self._enter(State.RESIZING)
                text = "more workers are ready: changing size at the next step"
                self.record.event("resize", text, gen=generation.number)
                self._change_at = time.monotonic()
                self._tell_members(generation, "request", generation.number, pause=True)

    def _hung(self, generation: Generation) -> bool:
        """Whether a member says nothing any more, or all talk but none gets ahead."""
        limits = self.job.elastic
        staff = self.staff
        for member in [*staff.workers.of(Life.READY), *staff.loaders.of(Life.READY), *staff.keepers.of(Life.READY)]:
            silent = self.beacon.silence(member.ident)
            if silent is not None and silent > limits.silence_s:
                self._lose(member.ident, generation, f"silent for {silent:.1f} s")
        stuck = time.monotonic() - generation.last_word_at
        # Until its first step a generation builds and restores, which a large model may do for long in silence.
        if stuck > (limits.hang_s if generation.first_step_at is not None else max(limits.hang_s, RESTORE_LIMIT_S)):
            self.record.event("hang", f"no progress for {stuck:.0f} s", gen=generation.number, step=generation.step)
            generation.hung = f"no progress for {stuck:.0f} s"
        return bool(generation.lost or generation.hung)

    def _abort(self, generation: Generation) -> None:
        """End a broken generation everywhere; whoever does not return in time is ended and counted as lost."""
        self._change_at = evidence = time.monotonic()
        self._enter(State.RECOVERING)
        for ident, why in list(generation.lost.items())[:1]:
            self.record.event("fault", f"{ident}: {why}", gen=generation.number, member=ident, step=generation.step)
        self._tell_members(generation, "abort", generation.number)
        deadline = evidence + self.job.elastic.abort_s
        while generation.pending and (left := deadline - time.monotonic()) > 0:
            self._hear(generation, min(TICK_S, left))
        for ident in generation.pending:
            # Fencing: two generations must never train at once, so a process that does not answer is ended
            # before the next one is formed.
            self._lose(ident, generation, f"did not leave generation {generation.number} in time")
        generation.ending["abort"] = time.monotonic() - evidence

    def _hear_out(self, generation: Generation) -> None:
        """Reports and results come on different ways: take the last reports of those who returned."""
        deadline = time.monotonic() + HEAR_OUT_S
        while set(generation.outcomes) - generation.signed_off - set(generation.lost) and time.monotonic() < deadline:
            self._hear(generation, 0.05)

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
        self.history.append(policy.Generation(generation.number, generation.highest))
        if ends == {End.FINISHED}:
            self._enter(State.FINISHED)
            self.record.event("finished", f"all {self.job.train.steps} steps done", step=generation.step)
            return True
        if ends == {End.STOPPED}:
            self._enter(State.STOPPED)
            self.record.event("stopped", f"stopped before step {generation.step}: {self._stop}", step=generation.step)
            return True
        self._cause, self._planned = "resize", True
        return False

    def _saved_at_end(self, generation: Generation) -> bool:
        """Wait for the checkpoints that are under way; False if a keeper took the last one with it.

        Raises:
            JobFailed: the last state cannot be saved.
        """
        while self.drains.pending(generation.number):
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
        self.history.append(policy.Generation(generation.number, generation.highest, failure))
        decision = policy.FailurePolicy(self.job.elastic.max_failures).decide(self.history)
        if isinstance(decision, policy.GiveUp):
            raise JobFailed(decision.reason, root.trace if root is not None else None)
        # Of a node that is gone the workers are worth naming; its keeper only where it went alone.
        gone = sorted(generation.lost)
        gone = [ident for ident in gone if not self.staff.is_keeper(ident)] or gone
        lost = f"lost {', '.join(gone)}" if gone else ""
        self._cause = generation.hung or lost or str(error or cause)[:100]
        self._planned = False

    def _checkpoint_error(self, root: Outcome) -> None:
        if "restore" in root.phases:  # it had been read; so it is the keeping that failed
            raise JobFailed(root.error or "the state could not be kept", root.trace)
        self.resume.damaged(root.error or "")

    # -- hearing and telling -----------------------------------------------------------------------

    def _hear(self, generation: Generation | None, timeout_s: float) -> None:
        """Take events until the queue is empty, waiting ``timeout_s`` for the first."""
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
                self._keeper_said(ident, message)
            case Said(ident, message):
                self.chronicle.take(ident, message)
                if generation is not None and message.get("gen") == generation.number:
                    self._worker_said(generation, message)
            case Saved():
                self._saved(event)
            case Ended(ident, number, outcome):
                if generation is not None and number == generation.number:
                    generation.outcomes[ident] = outcome
            case Gone(ident, why):
                self._lose(ident, generation, why)
            case Started():
                if self.staff.started(event):
                    if self.staff.is_loader(event.ident):
                        self._tell_loaders(generation)
                    elif self.staff.is_keeper(event.ident):
                        self._announce_ring()
            case NodesSeen(capacity):
                for ident, why in self.staff.nodes(capacity):
                    self._lose(ident, generation, why)
            case StopAsked(why):
                self._stop = self._stop or why

    def _worker_said(self, generation: Generation, message: dict[str, Any]) -> None:
        if message["t"] == "draining":
            meta = {"layout": str(generation.plan.layout), "job": self.job.model_dump(mode="json")}
            self.drains.begin(generation.number, message["step"], generation.token, generation.nodes, meta)
        elif message["t"] == "step" and message["complete"] is not None and not generation.covered:
            generation.covered = True
            self._in_background(forget, list(self.staff.keeper_addresses().values()), generation.number)

    def _keeper_said(self, ident: str, message: dict[str, Any]) -> None:
        member = self.staff.keepers.get(ident)
        if member is None or member.life is not Life.READY:
            return
        match message["t"]:
            case "drained" | "drain_failed":
                self.drains.take(message)
            case "memory":
                self.view.memory[member.node] = message["used"]
            case kind:
                self.record.event(kind, _memory_trouble(message), **{k: v for k, v in message.items() if k != "t"})

    def _saved(self, event: Saved) -> None:
        self.drains.over(event)
        fields = {"step": event.step, "gen": event.generation, "took_s": event.seconds}
        if event.problem is None:
            self.view.checkpoint_step = max(event.step, self.view.checkpoint_step or 0)
            self.record.event("checkpoint", f"checkpoint of step {event.step} is durable", **fields)
        elif event.fenced:
            raise JobFailed(event.problem)
        else:
            self.generations[event.generation - 1].problems[event.step] = event.problem
            text = f"checkpoint failed: {event.problem}"
            self.record.event("checkpoint_failed", text, problem=event.problem, **fields)

    def _announce_ring(self) -> None:
        self._in_background(announce_ring, list(self.staff.keeper_addresses().values()))

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

    def _keeper_lost(self, ident: str, generation: Generation | None, why: str) -> None:
        """The memory of a node is gone. Ranks that kept their state there leave the generation, unharmed."""
        member = self.staff.keepers.get(ident)
        assert member is not None
        self.view.memory.pop(member.node, None)
        self.drains.lost(member.node)
        self._announce_ring()
        if generation is not None and member.node in generation.nodes:
            generation.lost[ident] = f"{why}, and with it the snapshots of node {member.node[:8]}"

    def _tell_loaders(self, generation: Generation | None) -> None:
        loaders = self.staff.loader_handles()
        if generation is not None and loaders:
            self._tell_members(generation, "set_loaders", generation.number, loaders)

    def _tell_members(self, generation: Generation, method: str, *args: Any, **kwargs: Any) -> None:
        for ident in generation.pending:
            member = self.staff.workers.get(ident)
            if member is not None and member.life is Life.READY:
                getattr(member.handle, method).options(concurrency_group="control").remote(*args, **kwargs)

    # -- the rest ----------------------------------------------------------------------------------

    def _should_grow(self, generation: Generation) -> bool:
        """Whether a plan over all ready workers would use more of them than work now."""
        slots = self.staff.slots()
        if len(slots) <= len(generation.members):
            return False
        usable = plan(slots, self.job.layout, self.facts, self.job.train.global_batch, generation.plan)
        decision = policy.resize(len(generation.members), len(usable.ranks), self.job.elastic)
        return isinstance(decision, policy.Grow)

    def _begun(self) -> None:
        """A generation completed its first step."""
        if self.state is State.FORMING:
            self._enter(State.RUNNING)

    def _enter(self, state: State) -> None:
        if state is not self.state:
            self.record.transition(self.state, state)
            self.state = state

    def _summary(self, failure: Exception | None) -> dict[str, Any]:
        path: str | None = None
        with contextlib.suppress(CheckpointError):
            durable = self.vault.list("shallow")
            newest = next((info for info in durable if info.intact), None)
            self.view.checkpoint_step = newest.step if newest else None
            path = newest.path if newest else None
        return {
            "name": self.job.name,
            "state": self.state.value,
            "error": None if failure is None else str(failure),
            "trace": getattr(failure, "trace", None),
            "stopped_by": self._stop,
            "steps": self.generations[-1].step if self.generations else 0,
            "loss": self.view.loss,
            "seconds": time.monotonic() - self._started_at,
            "generations": [generation_row(item) for item in self.generations],
            "evaluation": self.chronicle.evaluation,
            "checkpoint_step": self.view.checkpoint_step,
            "checkpoint_path": path,
            "bad_samples": self.chronicle.bad_samples,
            "metrics": self.view.last,
            "run_dir": self.run_dir,
        }


def _where(source: MemorySource | int | None) -> str:
    """Where a generation starts, for a person."""
    if source is None:
        return "the initial weights"
    if isinstance(source, MemorySource):
        return f"step {source.step} in memory"
    return f"the checkpoint of step {source}"


def _memory_trouble(message: dict[str, Any]) -> str:
    """What a keeper complains of, for a person."""
    match message["t"]:
        case "unreplicated":
            return f"no copy of {message['owner']}'s state on node {message['partner'][:8]}: {message['problem']}"
        case "courier_failed":
            return f"the state of {message['owner']} is not copied to other nodes any more: {message['problem']}"
        case "memory_short":
            return f"{message['owner']}: {message['problem']}"
        case "memory_damaged":
            return f"{message['slice']} of {message['owner']} in memory does not match its checksum; it is not used"
    return str(message)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
