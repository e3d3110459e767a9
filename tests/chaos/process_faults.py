"""Single processes: they die, freeze, stutter, or are told to go."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass
from typing import ClassVar, Self

from tests.chaos.fault import Blow, Fault
from tests.chaos.stage import Stage, alive, send
from tests.chaos.world import World

SILENCE_S = 4.0
"""``elastic.silence_s`` of the job."""


@dataclass(frozen=True)
class _Signalled(Fault):
    """A member of one kind gets one signal."""

    prefix: ClassVar[str] = "worker-"
    sign: ClassVar[signal.Signals] = signal.SIGKILL
    turn: float

    @classmethod
    def draw(cls, dice: random.Random, world: World) -> Self:
        return cls(round(dice.random(), 3))

    def strike(self, stage: Stage) -> Blow:
        pid = stage.pick_worker(self.turn) if self.prefix == "worker-" else stage.pick(self.prefix, self.turn)
        blow = stage.blow([pid])
        send(pid, self.sign)
        return blow


@dataclass(frozen=True)
class WorkerKilled(_Signalled):
    """SIGKILL, as the out-of-memory killer sends."""

    kind = "worker killed"
    weight = 2.0


@dataclass(frozen=True)
class WorkerTerminated(_Signalled):
    """SIGTERM to one worker, as an eviction sends: it leaves at a step boundary, and no step is lost."""

    kind = "worker told to end (SIGTERM)"
    sign = signal.SIGTERM

    def finish(self, stage: Stage, blow: Blow) -> None:
        stage.no_rollback_since(blow.at)


@dataclass(frozen=True)
class LoaderKilled(_Signalled):
    """A loader dies; nobody leaves the generation for it."""

    kind = "loader killed"
    prefix = "loader-"


@dataclass(frozen=True)
class KeeperKilled(_Signalled):
    """A node's snapshots are lost; its workers are unharmed."""

    kind = "keeper killed"
    prefix = "keeper-"

    def finish(self, stage: Stage, blow: Blow) -> None:
        dead = [stage.member_of[pid] for pid in blow.victims]
        on = [stage.node_of[name] for name in dead]
        stage.until(
            lambda: all(node in {stage.node_of[name] for name in stage.living("keeper-")} for node in on),
            30,
            f"a new keeper after {dead}",
        )


@dataclass(frozen=True)
class WorkerFrozen(_Signalled):
    """SIGSTOP: it lives, its connections too, but it says nothing. Thawed after it was given up, it must not train."""

    kind = "worker frozen (SIGSTOP)"
    sign = signal.SIGSTOP

    def finish(self, stage: Stage, blow: Blow) -> None:
        pid = blow.victims[0]
        send(pid, signal.SIGCONT)
        stage.until(lambda: not alive(pid), 15, f"the end of the thawed {stage.member_of[pid]}")
        assert stage.member_of[pid] not in stage.workers_of(stage.generation)


@dataclass(frozen=True)
class WorkerStutters(_Signalled):
    """Frozen for less than ``elastic.silence_s``: no reason to give anybody up."""

    kind = "worker stutters"

    def strike(self, stage: Stage) -> Blow:
        pid = stage.pick_worker(self.turn)
        blow = stage.blow(breaks=False)
        send(pid, signal.SIGSTOP)
        time.sleep(SILENCE_S / 4)
        send(pid, signal.SIGCONT)
        blow.last_at, blow.note = time.time(), str(pid)
        return blow

    def finish(self, stage: Stage, blow: Blow) -> None:
        assert int(blow.note) not in stage.lost_at, f"a worker was given up after {SILENCE_S / 4} s of silence"
        blow.note = ""


@dataclass(frozen=True)
class SlowRank(_Signalled):
    """A rank that gets a third of the time, for some seconds, as on a throttled machine: slow, but no fault."""

    kind = "slow rank"
    seconds: ClassVar[float] = 3.0

    def strike(self, stage: Stage) -> Blow:
        pid = stage.pick_worker(self.turn)
        blow = stage.blow(breaks=False)
        until = time.monotonic() + self.seconds
        while time.monotonic() < until:
            send(pid, signal.SIGSTOP)
            time.sleep(0.08)
            send(pid, signal.SIGCONT)
            time.sleep(0.04)
        blow.last_at = time.time()
        return blow
