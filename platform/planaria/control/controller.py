"""The controller: hears events, asks the policies, and acts. One thread, one queue, one state.

The way of a fault: evidence -> abort -> plan -> form -> restore -> first step. Surviving processes live
through all of it; only the processes that vanished, or did not answer in time, are replaced.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import time
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

import ray
import torch.distributed as dist

from planaria.config import JobConfig
from planaria.control import policy
from planaria.control.events import Ended, Event, Gone, NodesSeen, Said, Started, StopAsked
from planaria.control.generation import Generation
from planaria.control.members import Life, Member, Members, placements
from planaria.control.nodes import NodeTrust
from planaria.control.status import Status, generation_row
from planaria.observe.record import RunRecord
from planaria.planner.plan import ModelFacts, Plan, PlanError, plan
from planaria.recipe import Recipe
from planaria.runtime.beacon import BeaconServer
from planaria.runtime.fleet import Fleet, NodeWatch, Scaling
from planaria.runtime.groups import Rendezvous
from planaria.runtime.loop import End
from planaria.runtime.worker import Order, Outcome
from planaria.state.errors import CheckpointError
from planaria.state.vault import Vault

SETTLE_S = 10.0
"""A starting job waits this long for one more worker before it begins below its maximum."""
START_LIMIT_S = 180.0
"""A worker that has not come up by then is started again elsewhere."""
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


class JobFailed(Exception):
    """The job cannot go on; the message is the diagnosis."""


class Controller:
    """Body of the controller's Ray actor: :meth:`run` is the job, the other methods answer meanwhile."""

    def __init__(self, job: JobConfig, recipe: Recipe, facts: ModelFacts, run_dir: str, scaling: Scaling) -> None:
        self.job, self.facts, self.run_dir = job, facts, run_dir
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.record = RunRecord(run_dir)
        self.host = ray.util.get_node_ip_address()
        self.beacon = BeaconServer(
            self.host,
            secrets.token_hex(16),
            lambda ident, message: self.events.put(Said(ident, message)),
            lambda ident: self.events.put(Gone(ident, "its process ended")),
        )
        self.fleet = Fleet(job, recipe, run_dir, scaling, self.beacon.address)
        # One store for all generations, hosted by no rank, so that no rank's death can take it down.
        self.store = dist.TCPStore(self.host, 0, is_master=True, wait_for_workers=False)
        self.vault = Vault(run_dir, keep_last=job.checkpoint.keep_last, on_problem=self._checkpoint_problem)
        self.workers, self.loaders = Members("worker"), Members("loader")
        self.capacity: dict[str, int] = {}
        self.trust = NodeTrust()
        self._known_nodes: set[str] = set()
        self.state = State.WAITING
        self.generations: list[Generation] = []
        self.history: list[policy.Generation] = []
        self.status_view = Status(total_steps=job.train.steps)
        self._stop: str | None = None
        self._damaged: set[int] = set()
        self._waiting_since = time.monotonic()
        self._joined_at = time.monotonic()
        self._fault_at: float | None = None
        self._cause = "start"
        self._run_id = secrets.token_hex(4)
        self._loader_failures = 0
        self._bad_seen: set[tuple[int, int]] = set()
        self._evaluation: dict[str, Any] | None = None
        self._started_at = time.monotonic()

    # -- called through Ray ------------------------------------------------------------------------

    def stop(self, why: str) -> None:
        """Ask for an end at the next step boundary, with a checkpoint."""
        self.events.put(StopAsked(why))

    def status(self) -> dict[str, Any]:
        """What the live view shows; plain values."""
        view = self.status_view
        view.state, view.last_event = self.state.value, self.record.last_event
        view.workers = len(self.generations[-1].members) if self.generations else 0
        view.ready = sum(1 for _ in self.workers.of(Life.READY))
        return view.as_dict()

    def run(self) -> dict[str, Any]:
        """The whole job; returns its summary. Never raises for a failure of the job: see ``summary["error"]``."""
        watch = NodeWatch(self.fleet, lambda capacity: self.events.put(NodesSeen(capacity)), self.trust.suspects)
        error: str | None = None
        trace: str | None = None
        try:
            for _ in range(self.job.data.loaders):
                self._start_loader()
            self._drive()
        except (JobFailed, PlanError, CheckpointError) as failure:
            self._enter(State.FAILED)
            error = str(failure)
            trace = getattr(failure, "trace", None)
            self.record.event("failed", error)
        finally:
            watch.close()
            self._end_processes()
            self.beacon.close()
        summary = self._summary(error, trace)
        self.record.summary(summary)
        self.record.close()
        return summary

    # -- the job -----------------------------------------------------------------------------------

    def _drive(self) -> None:
        while True:
            self._await_workers()
            if self._stop is not None:
                self._enter(State.STOPPED)
                return
            generation = self._launch()
            self._supervise(generation)
            self._hear_out(generation)
            if self._conclude(generation):
                return

    def _await_workers(self) -> None:
        """Return once a generation can be formed, or a stop was asked for."""
        if not self.generations:
            self._enter(State.WAITING)
        self._waiting_since = time.monotonic()
        announced = False
        while self._stop is None:
            self._staff()
            ready = sum(1 for _ in self.workers.of(Life.READY))
            # After a fault no worker is waited for that may come: survivors go on at once, and grow later.
            settle = SETTLE_S if not self.generations else 0.0
            if not any(self.workers.of(Life.STARTING)) and ready >= sum(self.capacity.values()) > 0:
                settle = 0.0
            now = time.monotonic()
            decision = policy.wait(
                ready, now - self._waiting_since, self.job.elastic, settle_s=settle, quiet_s=now - self._joined_at
            )
            if isinstance(decision, policy.Start) and any(self.loaders.of(Life.READY)):
                return
            if isinstance(decision, policy.GiveUp):
                raise JobFailed(f"{decision.reason} (the cluster has places for {sum(self.capacity.values())})")
            if self.generations and not announced and ready < self.job.elastic.min_workers:
                announced = True
                self._enter(State.WAITING)
                self.record.event(
                    "waiting",
                    f"{ready} of at least {self.job.elastic.min_workers} workers left; waiting up to "
                    f"{self.job.elastic.wait_s:g} s for more",
                )
            self._hear(None, TICK_S)

    def _launch(self) -> Generation:
        """Plan and start the next generation."""
        self._enter(State.FORMING)
        planning = time.monotonic()
        previous = self.generations[-1].plan if self.generations else None
        slots = self.workers.slots()[: self.job.elastic.max_workers]
        chosen = plan(slots, self.job.layout, self.facts, self.job.train.global_batch, previous)
        resume = self._resume_step()
        number = len(self.generations) + 1
        generation = Generation(number, chosen, self._cause, resume or 0, self._fault_at, step=resume or 0)
        if self.generations:
            last = self.generations[-1]
            generation.phases |= last.ending
            if generation.step < last.step:
                self.record.event(
                    "rollback",
                    f"steps {generation.step} to {last.step - 1} are redone from the checkpoint of step {generation.step}",
                    gen=number,
                    steps_lost=last.step - generation.step,
                )
        generation.phases["plan"] = time.monotonic() - planning
        self.generations.append(generation)
        self.record.event(
            "generation",
            f"generation {number} ({self._cause}): {chosen.layout} on {len(chosen.ranks)} workers from step "
            f"{generation.step}. {chosen.reason}",
            gen=number,
            layout=str(chosen.layout),
            workers=list(chosen.ranks),
            spares=list(chosen.spares),
            step=generation.step,
            cause=self._cause,
        )
        loaders = [member.handle for member in self.loaders.of(Life.READY)]
        token = f"{self._run_id}-{number}"
        for rank, ident in enumerate(chosen.ranks):
            rendezvous = Rendezvous(number, rank, chosen.layout, self.host, self.store.port, self.job.elastic.hang_s)
            self._order(ident, Order(rendezvous, token, loaders, resume))
        return generation

    def _order(self, ident: str, order: Order) -> None:
        member = self.workers.get(ident)
        assert member is not None
        number = order.rendezvous.generation

        def done(future: Any) -> None:
            error = future.exception()
            if error is not None:
                self.events.put(Gone(ident, f"{type(error).__name__}: {str(error).splitlines()[0]}"))
            else:
                self.events.put(Ended(ident, number, future.result()))

        reference = member.handle.run.options(concurrency_group="train").remote(order)
        reference.future().add_done_callback(done)

    def _supervise(self, generation: Generation) -> None:
        """Return when every member has returned or vanished."""
        stop_sent = pause_sent = False
        while generation.pending:
            self._hear(generation, TICK_S)
            failed = [i for i, o in generation.outcomes.items() if o.end in (End.FAILED, End.ABORTED)]
            if generation.lost or failed:
                self._abort(generation)
                return
            if self._hung(generation):
                self._abort(generation)
                return
            self._staff()
            if self._stop is not None and not stop_sent:
                stop_sent = True
                self._enter(State.STOPPING)
                self._request(generation, stop=True)
            elif self.state is State.RUNNING and not pause_sent and self._should_grow(generation):
                pause_sent = True
                self._enter(State.RESIZING)
                self.record.event(
                    "resize", "more workers are ready: changing size at the next step", gen=generation.number
                )
                self._request(generation, pause=True)

    def _hung(self, generation: Generation) -> bool:
        """Whether a member says nothing any more, or all talk but none gets ahead."""
        limits = self.job.elastic
        for ident in generation.pending:
            silent = self.beacon.silence(ident)
            if silent is not None and silent > limits.silence_s:
                self._lose(ident, generation, f"silent for {silent:.1f} s")
        stuck = time.monotonic() - generation.last_word_at
        if stuck > limits.hang_s:
            self.record.event("hang", f"no progress for {stuck:.0f} s", gen=generation.number, step=generation.step)
            generation.lost["nobody in particular"] = f"no progress for {stuck:.0f} s"
        return bool(generation.lost)

    def _hear_out(self, generation: Generation) -> None:
        """Reports and results come on different ways: take the last reports of those who returned."""
        deadline = time.monotonic() + HEAR_OUT_S
        while set(generation.outcomes) - generation.signed_off - set(generation.lost) and time.monotonic() < deadline:
            self._hear(generation, 0.05)

    def _abort(self, generation: Generation) -> None:
        """End a broken generation everywhere; whoever does not return in time is ended and counted as lost."""
        evidence = time.monotonic()
        self._fault_at = evidence
        self._enter(State.RECOVERING)
        why = next(iter(generation.lost.items()), None)
        if why is not None:
            self.record.event(
                "fault", f"{why[0]}: {why[1]}", gen=generation.number, member=why[0], step=generation.step
            )
        for ident in generation.members:
            member = self.workers.get(ident)
            if ident not in generation.lost and member is not None:
                member.handle.abort.options(concurrency_group="control").remote(generation.number)
        deadline = evidence + self.job.elastic.abort_s
        while generation.pending and time.monotonic() < deadline:
            self._hear(generation, min(TICK_S, max(0.01, deadline - time.monotonic())))
        for ident in generation.pending:
            member = self.workers.get(ident)
            assert member is not None
            # Fencing: two generations must never train at once, so a process that does not answer is ended
            # before the next one is formed.
            self.fleet.kill(member.handle)
            self._lose(ident, generation, f"did not leave generation {generation.number} in time")
        generation.ending["abort"] = time.monotonic() - evidence

    def _conclude(self, generation: Generation) -> bool:
        """Look back at a generation that ended; True if the job is over."""
        outcomes = generation.outcomes
        self.status_view.generations = [generation_row(item) for item in self.generations]
        failed = {ident: o for ident, o in outcomes.items() if o.end is End.FAILED}
        if not generation.lost and not failed:
            self.history.append(policy.Generation(generation.number, self._highest(generation)))
            ends = {outcome.end for outcome in outcomes.values()}
            if ends == {End.FINISHED}:
                self._enter(State.FINISHED)
                self.record.event("finished", f"all {self.job.train.steps} steps done", step=generation.step)
                return True
            if ends == {End.STOPPED}:
                self._enter(State.STOPPED)
                self.record.event(
                    "stopped", f"stopped before step {generation.step} ({self._stop})", step=generation.step
                )
                return True
            self._cause, self._fault_at = "resize", time.monotonic()
            return False
        root = _root_cause(generation)
        damaged = next((o for o in failed.values() if o.kind in ("CheckpointDamaged", "CheckpointError")), None)
        if damaged is not None and generation.step == generation.start_step and generation.start_step:
            self._damaged.add(generation.start_step)
            self.record.event("checkpoint_damaged", f"{damaged.error}", step=generation.start_step)
        elif damaged is not None:
            raise JobFailed(damaged.error or "a checkpoint could not be saved")
        error = policy.UserError(root.kind or "Exception", root.error or "") if root is not None else None
        if root is not None:
            self.record.event(
                "error", f"{root.kind}: {root.error}", gen=generation.number, step=generation.step, trace=root.trace
            )
        cause = str(error) if error else "; ".join(f"{who}: {why}" for who, why in generation.lost.items())
        self.history.append(
            policy.Generation(
                generation.number, self._highest(generation), policy.Failure(cause, generation.step, error)
            )
        )
        if root is not None and root.kind in ("DataError", "ConfigError"):
            raise _failed(root.error or root.kind, root)
        decision = policy.FailurePolicy(self.job.elastic.max_failures).decide(self.history)
        if isinstance(decision, policy.GiveUp):
            raise _failed(decision.reason, root)
        self._cause = f"lost {', '.join(sorted(generation.lost))}" if generation.lost else f"{error}"[:120]
        return False

    def _highest(self, generation: Generation) -> int | None:
        return generation.step - 1 if generation.step > generation.start_step else None

    # -- hearing -----------------------------------------------------------------------------------

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
            case Said(ident, message):
                self._said(ident, message)
            case Ended(ident, number, outcome):
                if generation is not None and number == generation.number:
                    generation.outcomes[ident] = outcome
            case Gone(ident, why):
                self._lose(ident, generation, why)
            case Started(ident, facts, error):
                self._started(ident, facts.pid if facts else 0, error)
            case NodesSeen(capacity):
                self._nodes(capacity, generation)
            case StopAsked(why):
                self._stop = self._stop or why

    def _said(self, ident: str, message: dict[str, Any]) -> None:
        if "gen" not in message or not 0 < message["gen"] <= len(self.generations):
            return
        generation = self.generations[message["gen"] - 1]
        kind = message["t"]
        if kind == "end":
            generation.signed_off.add(ident)
        elif kind == "phase":
            generation.last_word_at = time.monotonic()
        elif kind == "ready":
            for phase, seconds in message["phases"].items():
                generation.phases[phase] = max(generation.phases.get(phase, 0.0), seconds)
            generation.last_word_at = time.monotonic()
        elif kind == "step":
            self._step(generation, message)
        elif kind == "checkpoint" and message["rank"] == 0:
            self.status_view.checkpoint_step = message["step"]
            self.record.event("checkpoint", f"checkpoint of step {message['step']} is durable", **_plain(message))
        elif kind == "checkpoint_failed" and message["rank"] == 0:
            self.record.event("checkpoint_failed", f"checkpoint failed: {message['problem']}", **_plain(message))
        elif kind == "eval" and message["rank"] == 0:
            self._evaluation = {k: v for k, v in message.items() if k not in ("t", "gen", "rank")}
            self.record.event("evaluation", f"held out: {self._evaluation}", **_plain(message))

    def _step(self, generation: Generation, message: dict[str, Any]) -> None:
        first = generation.first_step_at is None
        generation.note_step(message)
        for bad in message["bad"]:
            self._bad_sample(bad)
        if message["rank"] == 0:
            if first and generation.first_step_at is not None:
                self._first_step(generation)
            self.status_view.note(message, generation)
            row = {k: v for k, v in message.items() if k not in ("t", "ids", "bad", "rank")}
            self.record.metrics(row | {"layout": str(generation.plan.layout)})
            if message["skipped"]:
                self.record.event(
                    "skipped", f"step {message['step']}: gradient not finite, step skipped", step=message["step"]
                )
        gathered = generation.gather(message)
        if gathered is not None:
            ids, tokens = gathered
            self.record.ledger(message["step"], generation.number, ids)
            self.status_view.note_tokens(tokens, message["step_s"])

    def _first_step(self, generation: Generation) -> None:
        if self.state is State.FORMING:
            self._enter(State.RUNNING)
        if generation.fault_at is not None and generation.recovery_s is not None:
            # The rest of the time: the orders' way to the workers, the first batch, and the step itself.
            generation.phases["first_step"] = max(0.0, generation.recovery_s - sum(generation.phases.values()))
            self.record.event(
                "recovered",
                f"generation {generation.number}: first step {generation.recovery_s:.2f} s after the "
                f"{'change' if self._cause == 'resize' else 'fault'}",
                gen=generation.number,
                seconds=generation.recovery_s,
                phases=generation.phases,
            )
        self.status_view.generations = [generation_row(item) for item in self.generations]

    def _bad_sample(self, bad: dict[str, Any]) -> None:
        key = (bad["position"], bad["attempt"])
        if key in self._bad_seen:
            return
        self._bad_seen.add(key)
        self.status_view.bad_samples = len(self._bad_seen)
        self.record.event("bad_sample", f"sample {bad['key']} replaced: {bad['cause']}", **bad)
        done = max(1, max(generation.step for generation in self.generations) + 1) * self.job.train.global_batch
        allowed = max(1.0, self.job.data.max_bad_fraction * max(done, 1000))
        if len(self._bad_seen) > allowed:
            raise JobFailed(
                f"{len(self._bad_seen)} damaged samples among about {done}, more than data.max_bad_fraction="
                f"{self.job.data.max_bad_fraction:g} allows; last: {bad['key']}: {bad['cause']}. Repair the data "
                f"(events.jsonl names every damaged sample) or raise data.max_bad_fraction"
            )

    def _checkpoint_problem(self, problem: str) -> None:
        self.record.event("checkpoint_damaged", problem)

    # -- processes ---------------------------------------------------------------------------------

    def _staff(self) -> None:
        """Start workers where there is room, up to the maximum, and replace loaders."""
        for member in list(self.workers.of(Life.STARTING)):
            if time.monotonic() - member.since > START_LIMIT_S:
                self.fleet.kill(member.handle)
                self._lose(member.ident, None, f"did not come up within {START_LIMIT_S:.0f} s")
        now = time.monotonic()
        carried = self.workers.per_node()
        usable = {node: places for node, places in self.capacity.items() if self.trust.usable(node, now)}
        # A start on a node under suspicion may hang until Ray finds the node dead; it must not take the
        # place of one that another node could have.
        doubtful = sum(1 for m in self.workers.of(Life.STARTING) if m.node in self.trust.suspects())
        wanted = self.job.elastic.max_workers - sum(carried.values()) + doubtful
        for node in placements(usable, carried, wanted):
            ident = self.workers.next_ident()
            handle = self.fleet.start_worker(ident, node)
            self.workers.add(Member(ident, node, handle))
            reference = handle.ready.options(concurrency_group="control").remote()
            reference.future().add_done_callback(lambda future, ident=ident: self.events.put(_started(ident, future)))
        if len(list(self.loaders.of(Life.STARTING, Life.READY))) < self.job.data.loaders:
            self._start_loader()

    def _start_loader(self) -> None:
        ident = self.loaders.next_ident()
        handle = self.fleet.start_loader(ident)
        self.loaders.add(Member(ident, "", handle))
        handle.ready.remote().future().add_done_callback(lambda future: self.events.put(_started(ident, future)))

    def _started(self, ident: str, pid: int, error: BaseException | None) -> None:
        members = self._members_of(ident)
        member = members.get(ident)
        if member is None or member.life is not Life.STARTING:
            return
        if error is None:
            members.ready(ident, pid)
            self._joined_at = time.monotonic()
            if member.node:
                self.trust.proved(member.node)
            self.record.event("joined", f"{ident} is ready", member=ident, node=member.node, pid=pid)
            if members is self.loaders:
                self._loader_failures = 0
                self._tell_loaders()
            return
        cause = getattr(error, "cause", None)
        if members is self.loaders and isinstance(cause, Exception):
            self._loader_failures += 1
            if not isinstance(cause, OSError) or self._loader_failures > 3:
                raise JobFailed(f"the data cannot be opened: {cause}")
        elif members is self.workers and isinstance(error, ray.exceptions.RayTaskError):
            raise JobFailed(f"{ident} cannot start: {cause or error}")
        self._lose(ident, None, f"{type(error).__name__} while starting")

    def _nodes(self, capacity: dict[str, int], generation: Generation | None) -> None:
        gone = set(self.capacity) - set(capacity)
        for node in set(capacity) - set(self.capacity):
            if node not in self._known_nodes:
                self._known_nodes.add(node)
                self.trust.proved(node)
            self.record.event("node_joined", f"node {node[:8]} joined with {capacity[node]} place(s)", node=node)
        for node in gone:
            self.record.event("node_left", f"node {node[:8]} left", node=node)
            for member in list(self.workers.of(Life.STARTING, Life.READY)):
                if member.node == node:
                    self._lose(member.ident, generation, f"its node {node[:8]} left")
        self.capacity = capacity

    def _lose(self, ident: str, generation: Generation | None, why: str) -> None:
        members = self._members_of(ident)
        member = members.get(ident)
        if not members.lose(ident) or member is None:
            return
        self.record.event("lost", f"{ident} lost: {why}", member=ident, node=member.node, pid=member.pid)
        self.fleet.kill(member.handle)
        if members is self.loaders:
            self._tell_loaders()
            return
        self.trust.failed(member.node, time.monotonic())
        if generation is not None and ident in generation.members and ident not in generation.outcomes:
            generation.lost[ident] = why

    def _tell_loaders(self) -> None:
        """Tell the running workers which loaders live."""
        loaders = [member.handle for member in self.loaders.of(Life.READY)]
        if self.generations and loaders:
            for ident in self.generations[-1].members:
                member = self.workers.get(ident)
                if member is not None and member.life is Life.READY:
                    member.handle.set_loaders.options(concurrency_group="control").remote(loaders)

    def _members_of(self, ident: str) -> Members:
        return self.loaders if ident.startswith("loader-") else self.workers

    def _should_grow(self, generation: Generation) -> bool:
        """Whether a plan over all ready workers would use more of them than work now."""
        slots = self.workers.slots()[: self.job.elastic.max_workers]
        if len(slots) <= len(generation.members):
            return False
        usable = plan(slots, self.job.layout, self.facts, self.job.train.global_batch, generation.plan)
        decision = policy.resize(len(generation.members), len(usable.ranks), self.job.elastic)
        return isinstance(decision, policy.Grow)

    def _request(self, generation: Generation, *, pause: bool = False, stop: bool = False) -> None:
        for ident in generation.members:
            member = self.workers.get(ident)
            if member is not None and member.life is Life.READY:
                member.handle.request.options(concurrency_group="control").remote(
                    generation.number, pause=pause, stop=stop
                )

    def _end_processes(self) -> None:
        for members in (self.workers, self.loaders):
            for member in members.of(Life.STARTING, Life.READY):
                self.fleet.kill(member.handle)

    # -- the rest ----------------------------------------------------------------------------------

    def _resume_step(self) -> int | None:
        """Step of the newest checkpoint that is intact as far as is known; None to start afresh."""
        found = self.vault.list("shallow")
        for info in found:
            if info.intact and info.step not in self._damaged:
                if not self.generations:
                    self._check_same_job(info.step)
                return info.step
            if info.step not in self._damaged:
                self._damaged.add(info.step)
                self.record.event("checkpoint_damaged", info.problem or f"checkpoint of step {info.step} is damaged")
        if found:
            raise JobFailed(
                f"none of the {len(found)} checkpoints in {self.run_dir} is intact (see events.jsonl); restore one, "
                f"or start afresh under another name"
            )
        return None

    def _check_same_job(self, step: int) -> None:
        """A run directory belongs to one job: refuse to go on with another model, tell of a changed course."""
        with self.vault.at(step) as checkpoint:
            before = dict(checkpoint.meta.get("job") or {})
        now = self.job.model_dump(mode="json")
        if before.get("model") != now["model"]:
            raise JobFailed(
                f"{self.run_dir} holds checkpoints of another model ({before.get('model')}, not {now['model']}); "
                f"choose another name, or remove that folder"
            )
        changed = [key for key in ("seed", "data", "optim", "train") if before.get(key) != now[key]]
        note = f"; changed since: {', '.join(changed)}" if changed else ""
        self.record.event("resumed", f"going on from the checkpoint of step {step}{note}", step=step, changed=changed)

    def _enter(self, state: State) -> None:
        if state is not self.state:
            self.record.transition(self.state, state)
            self.state = state

    def _summary(self, error: str | None, trace: str | None) -> dict[str, Any]:
        with contextlib.suppress(CheckpointError):
            self.status_view.checkpoint_step = next((i.step for i in self.vault.list() if i.intact), None)
        return {
            "name": self.job.name,
            "state": self.state.value,
            "error": error,
            "trace": trace,
            "steps": self.generations[-1].step if self.generations else 0,
            "loss": self.status_view.loss,
            "seconds": time.monotonic() - self._started_at,
            "generations": [generation_row(item) for item in self.generations],
            "evaluation": self._evaluation,
            "checkpoint_step": self.status_view.checkpoint_step,
            "bad_samples": len(self._bad_seen),
            "metrics": self.status_view.last,
            "run_dir": self.run_dir,
            "pid": os.getpid(),
        }


def _started(ident: str, future: Any) -> Started:
    error = future.exception()
    if error is not None:
        return Started(ident, None, error)
    facts = future.result()
    return Started(ident, facts if ident.startswith("worker-") else None)


def _root_cause(generation: Generation) -> Outcome | None:
    """The error that is not a mere consequence of somebody else's: collectives fail everywhere when one rank ends."""
    failed = [o for o in generation.outcomes.values() if o.end is End.FAILED and o.error]
    own = [o for o in failed if not is_peer_error(o.kind, o.error)]
    if own:
        return own[0]
    return None if generation.lost else next(iter(failed), None)


def is_peer_error(kind: str | None, error: str | None) -> bool:
    """Whether an error says only that a peer or the connection to it is gone."""
    if kind in ("DistBackendError", "DistNetworkError", "DistStoreError", "Interrupted"):
        return True
    words: Iterable[str] = ("gloo", "Connection reset", "Connection closed", "NCCL", "aborted", "Broken pipe")
    return kind == "RuntimeError" and any(word.lower() in (error or "").lower() for word in words)


def _failed(reason: str, root: Outcome | None) -> JobFailed:
    failure = JobFailed(reason)
    failure.trace = root.trace if root is not None else None  # type: ignore[attr-defined]
    return failure


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key not in ("t", "rank")}


__all__ = ["Controller", "JobFailed", "Plan", "State"]
