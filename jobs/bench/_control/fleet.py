"""A fleet of machines as the controller knows it, and the controller's round of decisions over it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from _control.traces import NOTICE_S, Fault
from planaria.config import JobConfig, parse
from planaria.control.members import Life, Member, Members, placements
from planaria.control.nodes import NodeTrust
from planaria.control.policies import hang as hangs
from planaria.control.policies import quarantine, straggler
from planaria.control.policies.decisions import Pause
from planaria.control.policies.drain import Leave, Notice, drain
from planaria.control.policies.failure import Failure, FailurePolicy, Generation
from planaria.control.policies.numerics import judge_steps
from planaria.control.policies.resize import Calm, Grow, growths_undone, resize, settle_time
from planaria.control.policies.waiting import Start, wait
from planaria.planner.plan import ModelFacts, Plan, WorkerSlot, plan
from planaria.runtime.hello import Hello

TP = 8
STEP_S = 5.0
WINDOW = 3
"""Steps over which stragglers are looked for."""
CHANGE_S = 2.0
"""What a change of size takes, as the fleet tells its policies."""
FACTS = ModelFacts({"attention heads": 64})

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def job(workers: int) -> JobConfig:
    """The job that is controlled."""
    return parse(
        {
            "model": {"preset": "llava-tiny"},
            "train": {"steps": 1_000_000, "global_batch": 4 * workers},
            "layout": {"tp": TP, "dp_replicate": 4},
            # Faults come so fast here that a longer limit would hardly ever be reached between two of them.
            "elastic": {"min_workers": max(1, workers // 10), "max_workers": workers, "hang_s": 6 * STEP_S},
        }
    )


class Stopwatch:
    """Seconds by name."""

    def __init__(self) -> None:
        self.laps: dict[str, list[float]] = {}

    def time(self, name: str, call: Callable[_Args, _Result], *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        """Call and note how long it took."""
        began = time.perf_counter()
        result = call(*args, **kwargs)
        self.laps.setdefault(name, []).append(time.perf_counter() - began)
        return result


class Fleet:
    """Machines, their workers and one training job. Time is simulated, what decisions take is measured.

    A round is everything that a controller does when it hears of something, but for the plan, which is measured on
    its own: bring the books up to date, ask every policy whose input may have changed.
    """

    def __init__(self, machines: int, per_machine: int, seed: int) -> None:
        self.job = job(machines * per_machine)
        self.rng = random.Random(seed)
        self.watch = Stopwatch()
        self.per_machine, self.now = per_machine, 0.0
        self.workers, self.trust = Members("worker"), NodeTrust()
        self.nodes: dict[int, str] = {}
        """Name of the node that a machine is; another one each time that it comes."""
        self.machine_of: dict[str, int] = {}
        self.capacity: dict[str, int] = {}
        self.standbys: dict[str, str] = {}
        self.notices: dict[str, Notice] = {}
        self.plan: Plan | None = None
        """The newest; it holds unless the job waits."""
        self.waiting = False
        """Whether too few workers are left."""
        self.place: dict[str, int] = {}
        """Rank by member."""
        self.words: dict[int, hangs.Word] = {}
        self.seconds: dict[int, list[float]] = {}
        self.standing = straggler.Standing()
        self.history: list[Generation] = []
        self.hangs: list[hangs.Hang] = []
        self.stuck: set[str] = set()
        self.slow: set[str] = set()
        self.stays: list[float] = []
        self.grown_at: float | None = None
        self.arrived_at = self.more_since = self.began = 0.0
        self.step = 0
        self.counts: dict[str, int] = {}
        self._born = 0
        for machine in range(machines):
            self._appear(machine)
        self._start()
        self._replan("start", failed=False)

    # -- what happens ------------------------------------------------------------------------------

    def take(self, fault: Fault) -> None:
        """One fault, and the round that it causes."""
        self.now = max(self.now, fault.at)
        self.watch.time("decision", self._round, fault)
        self._carry_out()

    def tick(self) -> None:
        """One step of training: every rank reports, and a round looks at what they said."""
        self.now += STEP_S
        self.watch.time("words", self._hear)
        self.watch.time("decision", self._round, None)
        self._carry_out()

    def _hear(self) -> None:
        """A heartbeat, a word and a compute time of every rank."""
        self.step += 1
        noise, now = self.rng.gauss, self.now
        waits = bool(self.stuck & self.place.keys())  # if one is stuck, the others get as far as the next collective
        number = len(self.history) + 1
        for rank, ident in enumerate(self._ranks()):
            old = self.words[rank]
            if waits:
                here = old if ident in self.stuck or old.phase == "reduce" else None
                word = (
                    hangs.Word(ident, old.node, number, old.step, old.phase, old.at, old.micro, now)
                    if here is not None
                    else hangs.Word(ident, old.node, number, old.step, "reduce", now, 0, now)
                )
            else:
                word = hangs.Word(ident, old.node, number, self.step, "step", now, 1, now)
                factor = 2.0 if old.node in self.slow else 1.0
                self.seconds[rank].append(factor * noise(1.0, 0.02))
            self.words[rank] = word

    # -- the round ---------------------------------------------------------------------------------

    def _round(self, fault: Fault | None) -> None:
        self._todo: list[tuple[str, bool]] = []
        """Why to plan anew, and whether that is a failure."""
        if fault is not None:
            self._enter(fault)
        else:
            self._look_at_words()
        self._drain()
        self._resize()

    def _enter(self, fault: Fault) -> None:
        machine, node = fault.machine, self.nodes.get(fault.machine)
        if fault.kind == "back":
            if node is None:
                self._appear(machine)
                self._start()
            return
        if node is None:
            return
        self.counts[fault.kind] = self.counts.get(fault.kind, 0) + 1
        match fault.kind:
            case "lost":
                self._vanish(node)
            case "notice":
                self.notices[node] = Notice(self.now + NOTICE_S, "preempted", self.now)
            case "crash":
                self._crash(node)
            case "stuck":
                self.stuck.update(self._members(node)[:1])
            case "slow":
                self.slow.add(node)
            case "well":
                self.slow.discard(node)
            case "wrong":
                self._compare(node)

    def _look_at_words(self) -> None:
        limits = self.watch.time("hang limits", hangs.HangLimits.of, self.job)
        hang = self.watch.time(
            "hang", hangs.watch, self.words, len(self.history) + 1, self.began, [STEP_S] * 20, False, self.now, limits
        )
        if hang is not None:
            hang = hangs.again(hang, self.hangs, self.words)
            self.hangs = [*self.hangs, hang][-8:]
            self.counts["hang"] = self.counts.get("hang", 0) + 1
            for rank in hang.culprits:
                word = self.words[rank]
                self.trust.blame(word.node, quarantine.Blame(self.now, quarantine.Fault.HANG, hang.why))
                self._lose(word.member)
                self._judge(word.node)
            self._todo.append((hang.why, True))
        elif self.seconds and len(self.seconds[0]) == WINDOW:
            known = {item.seat for item in self.standing.stragglers}
            self.standing = self.watch.time("straggler", self._compare_times)
            new = [item for item in self.standing.stragglers if item.seat not in known]
            self.counts["straggler"] = self.counts.get("straggler", 0) + len(new)
            straggler.replacement(self.standing, self._spares(), enabled=True)
        self.watch.time("numerics", judge_steps, (), self.step, self.job.elastic.bad_steps, (0,))

    def _compare_times(self) -> straggler.Standing:
        nodes = {rank: word.node for rank, word in self.words.items()}
        names = {rank: word.member for rank, word in self.words.items()}
        times, self.seconds = self.seconds, {rank: [] for rank in self.seconds}
        return straggler.judge(times, nodes, self.standing, self.job.elastic.straggler_ratio, names)

    def _drain(self) -> None:
        if not self.notices:
            return
        running: dict[str, list[str]] = {node: [] for node in self.notices}
        for ident in self._ranks():
            node = self._node(ident)
            running.setdefault(node, []).append(ident)
        decision = self.watch.time(
            "drain", drain, self.notices, running, self._spares(), [STEP_S], self.now, self.job.elastic
        )
        if isinstance(decision, (Leave, Pause)):
            for node in decision.nodes:
                self._vanish(node, planned=True)
            self._todo.append((f"leave {len(decision.nodes)} nodes", False))

    def _resize(self) -> None:
        ready = sum(1 for slot in self._slots())
        running = len(self._ranks())
        if ready <= running:
            self.more_since = self.now
        undone = growths_undone(self.stays, CHANGE_S)
        settle = settle_time(self.job.elastic.settle_s, CHANGE_S, undone)
        calm = Calm(self.now - self.arrived_at, self.now - self.more_since, settle)
        whole = ready - ready % TP
        decision = self.watch.time("resize", resize, running, max(whole, running), self.job.elastic, calm)
        if isinstance(decision, Grow) and not self._todo:
            self.grown_at = self.now
            self._todo.append(("grow", False))

    # -- bookkeeping -------------------------------------------------------------------------------

    def _appear(self, machine: int) -> None:
        node, self._born = f"node{self._born:x}", self._born + 1
        self.nodes[machine], self.machine_of[node] = node, machine
        self.capacity[node] = self.per_machine
        self.standbys[node] = f"standby-{self._born}"
        self.trust.arrived(node, f"10.{machine >> 16}.{machine >> 8 & 255}.{machine & 255}", self.now)
        self.trust.proved(node)
        self.arrived_at = self.now

    def _vanish(self, node: str, planned: bool = False) -> None:
        members = self._members(node)
        working = any(ident in self.place for ident in members)
        for ident in members:
            self.workers.lose(ident)
            if not planned:
                self.trust.failed(node, self.now, f"{ident} lost")
        machine = self.machine_of.pop(node, None)
        if machine is not None:
            del self.nodes[machine]
        for table in (self.capacity, self.standbys, self.notices):
            table.pop(node, None)
        self.slow.discard(node)
        self.trust.left(node, self.now)
        if working and not planned:
            self._undone()
            self._todo.append((f"lost {node}", True))

    def _crash(self, node: str) -> None:
        lost = self._members(node)[:1]
        if not lost:
            return
        self._lose(lost[0])
        self.trust.failed(node, self.now, f"{lost[0]} lost")
        self._judge(node)
        if node in self.standbys and node in self.capacity:
            self._ready(self.standbys.pop(node), node)
        self._todo.append((f"lost {lost[0]}", True))

    def _compare(self, node: str) -> None:
        """The node's replica differs from three others."""
        self.trust.blame(node, quarantine.Blame(self.now, quarantine.Fault.CHECKSUM, "its replica differs"))
        self._judge(node)

    def _judge(self, node: str) -> None:
        limits = self.job.elastic
        decision = self.watch.time(
            "quarantine", self.trust.decide, node, self.capacity, limits.node_failures, limits.min_workers, self.now
        )
        if isinstance(decision, quarantine.Quarantine):
            self.counts["quarantine"] = self.counts.get("quarantine", 0) + 1
            for ident in self._members(node):
                self._lose(ident)
            self._todo.append((f"quarantine of {node}", False))

    def _start(self) -> None:
        """Workers wherever there is room; they are ready at once."""
        usable = {node: places for node, places in self.capacity.items() if self.trust.usable(node, self.now)}
        carried = self.workers.per_node()
        wanted = self.job.elastic.max_workers - sum(carried.values())
        for node in self.watch.time("placements", placements, usable, carried, wanted):
            self._ready(self.workers.next_ident(), node)

    def _ready(self, ident: str, node: str) -> None:
        self.workers.add(Member(ident, node, None))
        self.workers.ready(ident, Hello(pid=1, node=node))
        self.arrived_at = self.now

    def _lose(self, ident: str) -> None:
        self.workers.lose(ident)
        self.stuck.discard(ident)
        self._undone()

    def _undone(self) -> None:
        if self.grown_at is not None:
            self.stays = [*self.stays, self.now - self.grown_at][-16:]
            self.grown_at = None

    # -- the way back to training ------------------------------------------------------------------

    def _carry_out(self) -> None:
        if self.waiting:
            self._start()
            self._replan("too few workers", failed=False)
        elif self._todo:
            why, _ = self._todo[0]
            failed = any(failed for _, failed in self._todo)
            for ident in [*self.stuck] if failed else ():
                self._lose(ident)  # it does not return when the generation is aborted
            self._replan(why, failed)
            self._start()

    def _replan(self, why: str, failed: bool) -> None:
        last = Generation(len(self.history) + 1, self.step, Failure(why, self.step) if failed else None)
        if self.plan is not None and not self.waiting:
            self.history.append(last)
            policy = FailurePolicy(self.job.elastic.max_failures)
            self.watch.time("failure", policy.decide, self.history)
        slots = self._slots()
        self.began = self.now
        decision = self.watch.time("waiting", wait, len(slots), 0.0, self.job.elastic)
        self.waiting = not isinstance(decision, Start)
        if self.waiting:
            self.place, self.words, self.seconds = {}, {}, {}
            return
        self.plan = self.watch.time(
            "replan", plan, slots, self.job.layout, FACTS, self.job.train.global_batch, self.plan
        )
        self.place = {ident: rank for rank, ident in enumerate(self.plan.ranks)}
        number = len(self.history) + 1
        self.words = {
            rank: hangs.Word(ident, self._node(ident), number, self.step, "forming", self.now, 0, self.now)
            for rank, ident in enumerate(self.plan.ranks)
        }
        self.seconds = {rank: [] for rank in range(len(self.plan.ranks))}

    def _ranks(self) -> tuple[str, ...]:
        return self.plan.ranks if self.plan is not None and not self.waiting else ()

    def _slots(self) -> list[WorkerSlot]:
        return [slot for slot in self.workers.slots() if not self.trust.held(slot.node, self.now)]

    def _node(self, ident: str) -> str:
        member = self.workers.get(ident)
        assert member is not None
        return member.node

    def _members(self, node: str) -> list[str]:
        return [member.ident for member in self.workers.of(Life.READY) if member.node == node]

    def _spares(self) -> dict[str, list[str]]:
        spares: dict[str, list[str]] = {}
        for slot in self._slots():
            if slot.id not in self.place:
                spares.setdefault(slot.node, []).append(slot.id)
        return spares

    def books(self) -> dict[str, Any]:
        """What the fleet came through."""
        living = sum(1 for _ in self.workers.of(Life.READY))
        return {"generations": len(self.history) + 1, "ready at the end": living} | self.counts
