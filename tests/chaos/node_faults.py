"""Whole nodes: they die, alone or together, return, and come and go."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Self

from tests.chaos.fault import Blow, Fault
from tests.chaos.stage import Stage
from tests.chaos.world import World


@dataclass(frozen=True)
class NodeKilled(Fault):
    """All processes of a node at once, as a power cut would."""

    kind = "node killed"
    weight = 2.0
    node: str

    @classmethod
    def possible(cls, world: World) -> bool:
        return len(world.nodes) > 1

    @classmethod
    def draw(cls, dice: random.Random, world: World) -> Self:
        node = dice.choice(list(world.nodes))
        world.remove(node)
        return cls(node)

    def strike(self, stage: Stage) -> Blow:
        blow = stage.blow(stage.members_on(self.node))
        stage.kill_nodes(self.node)
        return blow


@dataclass(frozen=True)
class NodesKilled(Fault):
    """Two nodes at the same instant: both holders of a slice may be among them."""

    kind = "two nodes killed at once"
    nodes: tuple[str, ...]

    @classmethod
    def possible(cls, world: World) -> bool:
        return len(world.nodes) > 2

    @classmethod
    def draw(cls, dice: random.Random, world: World) -> Self:
        nodes = tuple(dice.sample(list(world.nodes), 2))
        for node in nodes:
            world.remove(node)
        return cls(nodes)

    def strike(self, stage: Stage) -> Blow:
        blow = stage.blow(stage.members_on(*self.nodes))
        stage.kill_nodes(*self.nodes)
        return blow


@dataclass(frozen=True)
class AllNodesKilled(Fault):
    """Every worker is gone, and all memory; two nodes return, and the job goes on from the vault."""

    kind = "all nodes killed, two return"
    weight = 0.4
    nodes: tuple[str, ...]
    back: tuple[tuple[str, int], ...]

    @classmethod
    def draw(cls, dice: random.Random, world: World) -> Self:
        nodes = tuple(world.nodes)
        for node in nodes:
            world.remove(node)
        sizes = [dice.choice((1, 2)) for _ in range(2)]
        return cls(nodes, tuple((world.add(cpus), cpus) for cpus in sizes))

    def strike(self, stage: Stage) -> Blow:
        blow = stage.blow(stage.members_on(*self.nodes))
        stage.kill_nodes(*self.nodes)
        for name, cpus in self.back:
            stage.add_node(name, cpus)
        return blow


@dataclass(frozen=True)
class NodeReturns(Fault):
    """A node appears; over once its workers are there and the job has made use of them, if it can."""

    kind = "node returns"
    weight = 3.0
    node: str
    cpus: int

    @classmethod
    def possible(cls, world: World) -> bool:
        return world.missing > 0

    @classmethod
    def draw(cls, dice: random.Random, world: World) -> Self:
        cpus = dice.choice((1, 2))
        return cls(world.add(cpus), cpus)

    def strike(self, stage: Stage) -> Blow:
        blow = stage.blow(breaks=False)
        stage.add_node(self.node, self.cpus)
        return blow

    def over(self, stage: Stage, blow: Blow) -> bool:
        here = [member for member in stage.living("worker-") if stage.node_of[member] == stage.node(self.node).node_id]
        if len(here) < self.cpus or not stage.calm():
            return False
        # Its workers are used, or a plan over them would use no more than now: then nothing follows.
        blow.breaks = bool(set(here) & set(stage.workers_of(stage.generation)))
        joined = max(
            event["time"] for event in stage.events if event.get("member") in here and event["event"] == "joined"
        )
        row = next(
            (row for row in stage.steps if row["time"] > blow.at and set(here) & set(stage.workers_of(row["gen"]))),
            None,
        )
        if row is not None:
            blow.resumed_at = row["time"]
            return True
        blow.note = "spare"
        return time.time() - joined > 3.0 and stage.state == "running"


@dataclass(frozen=True)
class NodeFlaps(Fault):
    """A node comes and goes, faster than its workers start: the job must not be led astray."""

    kind = "node comes and goes"
    stays: tuple[tuple[str, float], ...]

    @classmethod
    def possible(cls, world: World) -> bool:
        return world.missing > 0

    @classmethod
    def draw(cls, dice: random.Random, world: World) -> Self:
        stays = []
        for _ in range(2):
            name = world.add(1)
            world.remove(name)
            stays.append((name, round(dice.uniform(0.0, 4.0), 2)))
        return cls(tuple(stays))

    def strike(self, stage: Stage) -> Blow:
        blow = stage.blow(breaks=False)
        for name, seconds in self.stays:
            stage.add_node(name, 1)
            time.sleep(seconds)
            stage.look()
            if stage.matters(stage.members_on(name)):  # it was quick enough to take part
                blow.breaks, blow.generation = True, stage.generation
                blow.victims += tuple(stage.members_on(name))
            blow.last_at = time.time()
            stage.kill_nodes(name)
        return blow
