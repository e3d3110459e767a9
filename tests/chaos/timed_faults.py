"""Faults at the worst moments: while groups form, while state comes back, while a checkpoint is written."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass
from typing import Self

from tests.chaos.fault import Blow, Fault
from tests.chaos.stage import Stage, send
from tests.chaos.world import World


@dataclass(frozen=True)
class _KilledInRecovery(Fault):
    """A worker dies, and when the next generation has been ordered, one of its members."""

    first: float
    second: float
    after_s: float

    def strike(self, stage: Stage) -> Blow:
        pid = stage.pick_worker(self.first)
        blow = stage.blow([pid])
        send(pid, signal.SIGKILL)
        stage.until(lambda: stage.generation > blow.generation, 60, "the next generation")
        time.sleep(self.after_s)
        other = stage.pick_worker(self.second)
        blow.last_at = time.time()
        blow.victims += (other,)
        send(other, signal.SIGKILL)
        return blow


@dataclass(frozen=True)
class KilledWhileForming(_KilledInRecovery):
    """The second death comes at once: groups are being formed."""

    kind = "worker killed while forming"

    @classmethod
    def draw(cls, dice: random.Random, world: World) -> Self:
        return cls(round(dice.random(), 3), round(dice.random(), 3), 0.0)


@dataclass(frozen=True)
class KilledWhileRestoring(_KilledInRecovery):
    """The second death comes a little later: the model is built, its state fetched, the first step made."""

    kind = "worker killed while restoring"

    @classmethod
    def draw(cls, dice: random.Random, world: World) -> Self:
        return cls(round(dice.random(), 3), round(dice.random(), 3), round(dice.uniform(0.05, 0.6), 2))


@dataclass(frozen=True)
class KilledWhileSaving(Fault):
    """A worker or a keeper dies just when a checkpoint has begun to be written."""

    kind = "killed during a checkpoint"
    turn: float
    keeper: bool

    @classmethod
    def draw(cls, dice: random.Random, world: World) -> Self:
        return cls(round(dice.random(), 3), dice.random() < 0.5)

    def strike(self, stage: Stage) -> Blow:
        every = stage.checkpoint_every
        seen = stage.step
        stage.until(lambda: stage.step > seen and stage.step % every == 0 and stage.calm(), 60, "a step to be saved")
        pid = stage.pick("keeper-", self.turn) if self.keeper else stage.pick_worker(self.turn)
        blow = stage.blow([pid])
        send(pid, signal.SIGKILL)
        return blow


@dataclass(frozen=True)
class KilledWhileResizing(Fault):
    """A worker dies at the moment when all are asked to pause, since a node has come."""

    kind = "worker killed while resizing"
    node: str
    cpus: int
    turn: float

    @classmethod
    def possible(cls, world: World) -> bool:
        return world.missing > 0

    @classmethod
    def draw(cls, dice: random.Random, world: World) -> Self:
        cpus = dice.choice((1, 2))
        return cls(world.add(cpus), cpus, round(dice.random(), 3))

    def strike(self, stage: Stage) -> Blow:
        stage.add_node(self.node, self.cpus)
        began = time.time()

        def asked() -> bool:
            here = [m for m in stage.living("worker-") if stage.node_of[m] == stage.node(self.node).node_id]
            resizing = any(event["event"] == "resize" and event["time"] > began for event in stage.events)
            # A node whose workers no layout can use leads to no change of size.
            return resizing or (len(here) == self.cpus and time.time() - began > 20)

        stage.until(asked, 90, "the change of size")
        pid = stage.pick_worker(self.turn)
        blow = stage.blow([pid])
        blow.note = "" if any(e["event"] == "resize" and e["time"] > began for e in stage.events) else "spare"
        send(pid, signal.SIGKILL)
        return blow
