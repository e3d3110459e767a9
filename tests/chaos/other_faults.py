"""Storage that fills up, the controller, and notices that a node will leave."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from dataclasses import dataclass
from typing import Self

from tests.chaos.fault import Blow, Fault
from tests.chaos.stage import Stage, send
from tests.chaos.world import World


@dataclass(frozen=True)
class DiskFull(Fault):
    """No checkpoint can be written for a while; training goes on, and later checkpoints are written again."""

    kind = "disk of the checkpoints full"
    weight = 0.5

    @classmethod
    def draw(cls, dice: random.Random, world: World) -> Self:
        return cls()

    def strike(self, stage: Stage) -> Blow:
        assert stage.ballast is not None
        blow = stage.blow(breaks=False)
        with contextlib.suppress(OSError), stage.ballast.open("wb", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass
        return blow

    def over(self, stage: Stage, blow: Blow) -> bool:
        assert stage.ballast is not None
        failed = any(e["event"] == "checkpoint_failed" and e["time"] > blow.at for e in stage.events)
        if failed and stage.ballast.exists():
            stage.ballast.unlink()
            blow.last_at = time.time()
        written = any(e["event"] == "checkpoint" and e["time"] > blow.last_at > 0 for e in stage.events)
        return written and blow.passed(stage)


@dataclass(frozen=True)
class ControllerKilled(Fault):
    """The controller's process dies; training goes on without it until it has returned."""

    kind = "controller killed"

    @classmethod
    def draw(cls, dice: random.Random, world: World) -> Self:
        return cls()

    def strike(self, stage: Stage) -> Blow:
        blow = stage.blow(breaks=False)
        send(stage.controller(), signal.SIGKILL)
        return blow

    def over(self, stage: Stage, blow: Blow) -> bool:
        back = [event["time"] for event in stage.events if event["event"] == "returned" and event["time"] > blow.at]
        row = next((row for row in stage.steps if back and row["time"] > back[0]), None)
        if row is not None:
            blow.resumed_at = row["time"]
        return row is not None

    def finish(self, stage: Stage, blow: Blow) -> None:
        later = [event for event in stage.generations if event["time"] > blow.at]
        assert not later, f"the loss of the controller ended a generation: {later[0]['text']}"


@dataclass(frozen=True)
class NodeDrained(Fault):
    """Ray is told that a node will leave (a spot notice): all that runs there leaves before, and no step is lost."""

    kind = "node drained"
    node: str
    deadline_s: float

    @classmethod
    def possible(cls, world: World) -> bool:
        return len(world.nodes) > 1

    @classmethod
    def draw(cls, dice: random.Random, world: World) -> Self:
        node = dice.choice(list(world.nodes))
        world.remove(node)
        return cls(node, round(dice.uniform(15, 30), 1))

    def strike(self, stage: Stage) -> Blow:
        blow = stage.blow(stage.members_on(self.node))
        stage.drain_node(self.node, self.deadline_s)
        return blow

    def finish(self, stage: Stage, blow: Blow) -> None:
        stage.no_rollback_since(blow.at)
        last = max(stage.lost_at[pid] for pid in blow.victims)
        assert last < blow.at + self.deadline_s, f"the node was still in use {last - blow.at:.1f} s after the notice"
        stage.kill_nodes(self.node)  # what the provider does at the deadline
