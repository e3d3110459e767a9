"""The controller: hears events, asks the policies, and acts. One thread, one queue, one state.

The way of a fault: evidence -> abort -> plan -> form -> restore -> first step. Surviving processes live
through all of it; only the processes that vanished, or did not answer in time, are replaced.

Each idea has a file of its own, functions over the ``Desk`` that all of them share: ``hearing`` (events), ``losses``,
``watching`` (silence and hangs), ``health`` (numbers and stragglers), ``departures``, ``choosing`` and ``moves``
(planned changes), ``forming`` and ``ending`` (of generations), ``returning`` (of the controller).
"""

from __future__ import annotations

import queue
import threading
import time
from functools import partial
from typing import Any

import ray

from planaria.config import JobConfig
from planaria.control import journal
from planaria.control import policies as policy
from planaria.control import summary as told
from planaria.control.chronicle import Chronicle
from planaria.control.custody import Custody
from planaria.control.departures import release
from planaria.control.desk import Desk
from planaria.control.ending import conclude
from planaria.control.events import Event, Gone, NodesSeen, Said, StopAsked
from planaria.control.exporting import Exporter
from planaria.control.failure import JobFailed
from planaria.control.filling import fill
from planaria.control.forming import launch
from planaria.control.generation import Generation
from planaria.control.hearing import take
from planaria.control.losses import lose
from planaria.control.moves import steer
from planaria.control.observations import Observations
from planaria.control.policies.states import State
from planaria.control.returning import take_up
from planaria.control.staff import Staff
from planaria.control.status import Status
from planaria.control.ticket import Ticket
from planaria.control.watching import hung, lose_silent
from planaria.data.identity import DataIdentity
from planaria.observe.environment import environment
from planaria.observe.record import RunRecord
from planaria.planner.plan import ModelFacts, PlanError
from planaria.recipe import Recipe
from planaria.runtime.beacon_server import BeaconServer
from planaria.runtime.fleet import Fleet, NodeWatch, Scaling
from planaria.runtime.groups import host_store
from planaria.runtime.outcome import End
from planaria.state.errors import CheckpointError

SETTLE_S = 10.0
"""A starting job waits this long for one more worker before it begins below its maximum."""
TICK_S = 0.25


class Controller:
    """Body of the controller's Ray actor: :meth:`run` is the job, the other methods answer meanwhile."""

    def __init__(
        self,
        job: JobConfig,
        recipe: Recipe,
        facts: ModelFacts,
        run_dir: str,
        scaling: Scaling,
        ticket: Ticket,
        data: DataIdentity | None = None,
    ) -> None:
        self.job = job
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        record = RunRecord(run_dir)
        record.job(job.model_dump(mode="json"))
        record.environment(environment() | ({"data": data.as_tree()} if data else {}))
        host = ray.util.get_node_ip_address()
        beacon = BeaconServer(
            host,
            ticket.secret,
            lambda ident, message: self.events.put(Said(ident, message)),
            lambda ident: self.events.put(Gone(ident, "its process ended")),
        )
        self.fleet = Fleet(job, recipe, run_dir, scaling, beacon.address, ticket.namespace)
        staff, view = Staff(job, self.fleet, record, self.events.put), Status(total_steps=job.train.steps)
        generations: list[Generation] = []
        self.desk = Desk(
            job,
            facts,
            run_dir,
            ticket,
            host,
            record,
            view,
            beacon,
            host_store(host),
            staff,
            Custody(job, run_dir, record, view, staff.keeper_addresses, self.events.put, data),
            Observations(job),
            Chronicle(job, record, view, generations, self._begun),
            self.events.put,
            generations,
        )
        self._exporter = Exporter(self.desk)
        self._driverless = False
        self._began = time.time()
        self._driver_at = time.monotonic()
        # Detached, it would stay for ever if nobody called for it: after its return, or after the end of the job.
        self._idle = self._leave_if_idle()

    # -- called through Ray ------------------------------------------------------------------------

    def stop(self, why: str) -> None:
        """Ask for an end at the next step boundary, with a checkpoint."""
        self.events.put(StopAsked(why))

    def status(self) -> dict[str, Any]:
        """What the live view shows; plain values. That somebody asks is the sign that the driver lives."""
        self._driver_at = time.monotonic()
        return told.status(self.desk, self._driver_at)

    def look(self) -> dict[str, Any]:
        """The status and more, for somebody who looks on: no sign that the driver lives."""
        return told.look(self.desk, self._began, time.monotonic())

    def run(self) -> dict[str, Any]:
        """The whole job; returns its summary. A failure of the job is told in ``summary["error"]``, not raised."""
        self._idle.cancel()
        desk = self.desk
        watch = NodeWatch(self.fleet, lambda *seen: self.events.put(NodesSeen(*seen)), desk.staff.ground.trust.suspects)
        failure: Exception | None = None
        try:
            rows = desk.record.rows("journal")
            past = journal.read(rows, desk.ticket.run_id)
            desk.custody.leave_out(journal.skips(rows))
            desk.record.journal(journal.run_row(desk.ticket.run_id, self._began, desk.record.sizes()))
            desk.custody.claim(f"{self.job.name} on {desk.host}")
            self.fleet.demand(self.job.elastic.max_workers)
            if past is not None:
                self._began = past.began
            self._exporter.begin(self._began, past.sizes if past is not None else None)
            self._drive(take_up(desk, past, partial(self._hear, timeout_s=TICK_S)) if past is not None else None)
        except (JobFailed, PlanError, CheckpointError) as error:
            failure = error
            desk.enter(State.FAILED)
            desk.record.event("failed", str(error))
        finally:
            watch.close()
            self.fleet.demand(0)
            desk.staff.end_all()
            desk.beacon.close()  # whoever could not be reached ends itself
        summary = told.summary(desk, self._began, desk.chronicle.evaluation, failure)
        desk.record.summary(summary)
        self._exporter.close()
        desk.record.close()
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
        desk = self.desk
        while True:
            if generation is None:
                self._await_workers()
                if desk.stop is not None and not self._unsaved():
                    desk.enter(State.STOPPED)
                    desk.record.event("stopped", f"stopped while no generation was running: {desk.stop}")
                    return
                generation = launch(desk)
            self._supervise(generation)
            if conclude(desk, generation, partial(self._hear, generation, TICK_S)):
                return
            generation = None

    def _await_workers(self) -> None:
        """Return once a generation can be formed, or a stop was asked for."""
        desk = self.desk
        limits, began, announced = self.job.elastic, time.monotonic(), False
        while desk.stop is None or self._unsaved():
            fill(desk.staff)
            release(desk, None)
            ready, now = len(desk.staff.slots()), time.monotonic()
            # After a fault nobody is waited for who may come: survivors go on at once, and grow later.
            settle = 0.0 if desk.generations or desk.staff.settled() else SETTLE_S
            decision = policy.wait(
                ready,
                now - began,
                limits,
                settle_s=settle,
                quiet_s=now - desk.staff.last_arrival,
                data=bool(desk.generations or desk.staff.loader_handles()),
            )
            if isinstance(decision, policy.Start):
                return
            if isinstance(decision, policy.GiveUp) and desk.stop is not None:
                desk.generations[-1].pause_cause = ""  # what was not saved cannot be, any more
                return
            if isinstance(decision, policy.GiveUp):
                places = sum(desk.staff.ground.capacity.values())
                trouble = f"; the last start that failed: {desk.staff.trouble}" if desk.staff.trouble else ""
                raise JobFailed(f"{decision.reason} (the cluster has places for {places}{trouble})")
            if desk.generations and not announced and ready < limits.min_workers:
                announced = True
                desk.enter(State.WAITING)
                desk.record.event(
                    "waiting",
                    f"{ready} of at least {limits.min_workers} workers left; waiting up to {limits.wait_s:g} s",
                )
            self._hear(None, TICK_S)

    def _unsaved(self) -> bool:
        """Whether the newest state is in memory alone, since all had paused when the job was asked to stop."""
        desk = self.desk
        last = desk.generations[-1] if desk.generations else None
        return last is not None and bool(last.pause_cause) and last.step != desk.view.checkpoint_step

    def _supervise(self, generation: Generation) -> None:
        """Return when every member has returned or vanished."""
        desk = self.desk
        while generation.pending:
            self._hear(generation, TICK_S)
            failed = any(o.end in (End.FAILED, End.ABORTED) for o in generation.outcomes.values())
            if generation.lost or failed or hung(desk, generation):
                self._abort(generation)
                return
            fill(desk.staff, calm=desk.state is State.RUNNING)
            release(desk, generation)
            steer(desk, generation)

    def _abort(self, generation: Generation) -> None:
        """End a broken generation everywhere; whoever does not return in time is ended and counted as lost."""
        desk = self.desk
        desk.change_at = evidence = time.monotonic()
        desk.chronicle.account.fault(evidence, generation.silent_since)
        desk.enter(State.RECOVERING)
        for ident, why in list(generation.lost.items())[:1]:
            desk.record.event("fault", f"{ident}: {why}", gen=generation.number, member=ident, step=generation.step)
        desk.tell_members(generation, "abort", generation.number)
        deadline = evidence + self.job.elastic.abort_s
        while generation.pending and (left := deadline - time.monotonic()) > 0:
            self._hear(generation, min(TICK_S, left))
            lose_silent(desk, generation)
        for ident in generation.pending:
            # Fencing: two generations must never train at once, so a process that does not answer is ended
            # before the next one is formed.
            lose(desk, ident, generation, f"did not leave generation {generation.number} in time")
        generation.ending["abort"] = time.monotonic() - evidence

    # -- hearing and telling -----------------------------------------------------------------------

    def _hear(self, generation: Generation | None, timeout_s: float) -> None:
        """Take events until the queue is empty, waiting ``timeout_s`` for the first."""
        desk = self.desk
        self._heed_driver()
        try:
            event = self.events.get(timeout=timeout_s)
        except queue.Empty:
            return
        while True:
            take(desk, event, generation)
            try:
                event = self.events.get_nowait()
            except queue.Empty:
                return

    def _heed_driver(self) -> None:
        """End the job, or not, if its driver is gone without having ended it."""
        desk = self.desk
        away = time.monotonic() - self._driver_at
        if desk.stop is None and not self._driverless and away > self.job.elastic.orphan_s:
            self._driverless = True
            ends = self.job.elastic.on_driver_loss == "stop"
            what = "the job ends with a checkpoint" if ends else "the job goes on"
            desk.record.event("driver_lost", f"the driver has not asked for {away:.0f} s; {what}")
            if ends:
                desk.stop = "the driver is gone"

    def _begun(self) -> None:
        """A generation completed its first step."""
        desk = self.desk
        generation = desk.generations[-1]
        desk.record.journal(journal.first_step_row(generation))
        grown = len(desk.generations) > 1 and len(generation.members) > len(desk.generations[-2].members)
        desk.seen.changed(generation, grown=grown, now=time.monotonic())
        if desk.state is State.FORMING:
            desk.enter(State.RUNNING)
