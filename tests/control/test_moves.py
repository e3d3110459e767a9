"""A spare takes over a straggler's rank, and the straggler gets none any more while others can have it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from planaria.config import parse
from planaria.control.choosing import choose, should_grow
from planaria.control.generation import Generation
from planaria.control.moves import steer
from planaria.control.observations import Observations
from planaria.control.policies.states import State
from planaria.control.policies.straggler import Standing, Straggler
from planaria.observe.record import RunRecord, read_lines
from planaria.planner.plan import ModelFacts, WorkerSlot, plan

SLOTS = [WorkerSlot("a0", "a"), WorkerSlot("b0", "b"), WorkerSlot("c0", "c")]
"""Three workers for batches of two samples: one is a spare."""


class Desk(SimpleNamespace):
    """What a healthy generation is steered by."""

    def __init__(self, tmp_path: Any, enabled: bool = True, **layout: Any) -> None:
        elastic = {"replace_stragglers": enabled, "max_workers": 3}
        job = parse({"train": {"steps": 9, "global_batch": 2}, "elastic": elastic, "layout": layout})
        chosen = plan(SLOTS, job.layout, ModelFacts(), 2)
        self.generation = Generation(1, chosen, "start", True, 0)
        self.generation.nodes = tuple(ident[0] for ident in chosen.ranks)
        self.told: list[tuple[str, dict[str, bool]]] = []
        staff = SimpleNamespace(
            slots=lambda: list(SLOTS),
            benched=set(),
            quitting=set(),
            ground=SimpleNamespace(leaving={}),
            last_change=-1000.0,
        )
        super().__init__(
            job=job,
            facts=ModelFacts(),
            record=RunRecord(tmp_path),
            staff=staff,
            seen=Observations(job),
            custody=SimpleNamespace(save_s=1.0),
            state=State.RUNNING,
            stop=None,
            rollback=None,
            change_at=None,
            worker=lambda ident: SimpleNamespace(node=ident[0]),
            tell_members=lambda generation, method, number, **how: self.told.append((method, how)),
        )

    def enter(self, state: State) -> None:
        self.state = state

    def slow(self, member: str) -> None:
        """The last window named a straggler."""
        rank = self.generation.members.index(member) if member in self.generation.members else 0
        self.seen.standing = Standing(stragglers=(Straggler(rank, member[0], 3.0, member),))


def events(desk: Desk) -> list[str]:
    return [event["event"] for event in read_lines(desk.record.path / "events.jsonl")]


def test_a_spare_takes_over_the_rank_of_a_straggler(tmp_path) -> None:
    desk: Any = Desk(tmp_path)
    (spare,) = desk.generation.plan.spares
    slow, other = desk.generation.members
    desk.slow(slow)
    steer(desk, desk.generation)
    assert (desk.state, desk.generation.pause_cause) == (State.RESIZING, "straggler")
    assert desk.told == [("request", {"pause": True})]
    assert events(desk) == ["replacing", "resize"]
    after = choose(desk, desk.generation.plan)
    assert set(after.ranks) == {spare, other}
    assert after.spares == (slow,)
    # It is not taken back merely because it is ready.
    second = Generation(2, after, "straggler", True, 0)
    assert not should_grow(desk, second)
    # Where one of the others is gone, it is better than nobody.
    desk.staff.slots = lambda: [slot for slot in SLOTS if slot.id != other]
    assert set(choose(desk, after).ranks) == {spare, slow}


@pytest.mark.parametrize("why", ["not wanted", "nobody slow", "an older window", "only benched spares"])
def test_otherwise_nothing_moves(tmp_path, why: str) -> None:
    desk: Any = Desk(tmp_path, enabled=why != "not wanted")
    if why != "nobody slow":
        desk.slow("elsewhere" if why == "an older window" else desk.generation.members[0])
    if why == "only benched spares":
        desk.staff.benched = set(desk.generation.plan.spares)
    benched = set(desk.staff.benched)
    steer(desk, desk.generation)
    assert desk.state is State.RUNNING
    assert not desk.told
    assert desk.staff.benched == benched
