"""The training loop at its edges, with stand-ins for engine and evaluation."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest

from planaria.config import JobConfig, parse
from planaria.engine.protocol import StepResult
from planaria.objectives.evaluate import Scores
from planaria.runtime import loop
from planaria.runtime.outcome import End
from planaria.runtime.progress import Place
from planaria.state.replicas import Comparison, Difference

JOB = parse({"model": {"preset": "llava-tiny"}, "train": {"steps": 4, "global_batch": 4}})


class Scored:
    def score(self, model: Any, batch: Any) -> Any: ...


def test_an_evaluation_shows_that_it_gets_ahead(monkeypatch) -> None:
    places: list[tuple[int, str, int]] = []
    seen: list[tuple[int, str, int]] = []

    def evaluate(engine: Any, held_out: Any, size: int, job: Any) -> Scores:
        for start in range(3):
            held_out(start, start + 1, 1)
            seen.append(places[-1])
        return Scores(3, float("nan"), 0, 0.0, 0.0)

    monkeypatch.setattr(loop, "evaluate", evaluate)
    engine: Any = SimpleNamespace(step_done=4, recipe=Scored())
    feed: Any = SimpleNamespace(held_out=lambda *_: None, held_out_size=lambda: 3)
    keeping: Any = SimpleNamespace(checkpoint=lambda: None)
    said: list[dict[str, Any]] = []
    end = loop.train(engine, feed, keeping, JOB, loop.Requests(), said.append, lambda *place: places.append(place))
    assert end is End.FINISHED
    assert seen == [(4, "evaluate", 0), (4, "evaluate", 1), (4, "evaluate", 2)]
    assert said[-1]["exact_match"] is None
    json.dumps(said, allow_nan=False)


class Keeping:
    """Remembers what it was asked to keep."""

    complete = None

    def __init__(self) -> None:
        self.asked: list[str] = []

    def poll(self) -> tuple[int, ...]:
        return (0, 0)

    def after_step(self, votes: tuple[int, ...]) -> float:
        self.asked.append("step")
        return 0.0

    def snapshot(self) -> None:
        self.asked.append("snapshot")

    def checkpoint(self) -> None:
        self.asked.append("checkpoint")


class Engine:
    """Takes steps that do nothing, and says how they went."""

    def __init__(self, **result: Any) -> None:
        self.step_done, self.recipe, self.result = 0, None, result
        self.compared: list[int] = []
        self.joined = True

    def train_step(self, micro_batches: Any, targets: int, poll: Any, at: Any) -> StepResult:
        for index in range(2):
            at("step", index)
        self.step_done += 1
        return dataclasses.replace(StepResult(0.5, 0.25, 0.1, 1, False, (0, 0), 0.125), **self.result)

    def compare_replicas(self) -> Comparison | None:
        self.compared.append(self.step_done)
        return Comparison((0, 1), 2, (Difference("a", (), ("0", "1")),))


SHARE = SimpleNamespace(micro_batches=[], bad=[])
FEED: Any = SimpleNamespace(get=lambda step: SHARE)


def run(monkeypatch: pytest.MonkeyPatch, engine: Any, job: JobConfig, requests: loop.Requests, **more: Any) -> Any:
    """(end, messages, what was kept) of a loop without peers."""
    monkeypatch.setattr(loop, "_agree", lambda engine, share, wishes: (1, wishes.pause, wishes.stop))
    keeping: Any = Keeping()
    said: list[dict[str, Any]] = []
    end = loop.train(engine, FEED, keeping, job, requests, said.append, **more)
    return end, said, keeping.asked


@pytest.mark.parametrize(
    ("ask", "end", "asked"),
    [
        ("pause", End.PAUSED, ["step", "snapshot"]),  # memory is enough to change size
        ("stop", End.STOPPED, ["step", "checkpoint"]),
        ("", End.FINISHED, ["step"] * 4 + ["checkpoint"]),
    ],
)
def test_every_end_keeps_the_state_as_it_must(monkeypatch, ask: str, end: End, asked: list[str]) -> None:
    requests = loop.Requests()

    class Asking(Engine):
        def train_step(self, *args: Any) -> StepResult:
            if ask:
                setattr(requests, ask, True)
            return super().train_step(*args)

    ended, _, kept = run(monkeypatch, Asking(), JOB, requests)
    assert (ended, kept) == (end, asked)


@pytest.mark.parametrize(("ask", "end"), [("pause", End.PAUSED), ("stop", End.STOPPED)])
def test_a_request_between_outer_steps_waits_for_the_next_one(monkeypatch, ask: str, end: End) -> None:
    requests = loop.Requests()

    class Rounds(Engine):
        """Replicas are joined after every third step."""

        def train_step(self, *args: Any) -> StepResult:
            setattr(requests, ask, True)
            result = super().train_step(*args)
            self.joined = self.step_done % 3 == 0
            return result

    engine = Rounds()
    ended, _, kept = run(monkeypatch, engine, JOB, requests)
    assert (ended, engine.step_done, len(kept)) == (end, 3, 4)


def test_the_place_is_told_in_the_order_in_which_ranks_get_ahead(monkeypatch) -> None:
    places: list[Place] = []
    run(monkeypatch, Engine(), JOB, loop.Requests(), at=lambda *place: places.append(Place.of(*place)))
    assert places == sorted(places)
    assert [place.phase for place in places[:6]] == ["data", "agree", "step", "step", "keep", "data"]


def test_a_step_says_what_this_rank_needed_itself(monkeypatch) -> None:
    _, said, _ = run(monkeypatch, Engine(), JOB, loop.Requests())
    assert [message["compute_s"] for message in said if message["t"] == "step"] == [0.125] * 4


def test_numbers_that_are_not_finite_are_null_in_messages(monkeypatch) -> None:
    engine = Engine(loss=float("nan"), grad_norm=float("inf"), skipped=True)
    _, said, _ = run(monkeypatch, engine, JOB, loop.Requests())
    told = next(message for message in said if message["t"] == "step")
    assert (told["loss"], told["grad_norm"], told["skipped"]) == (None, None, True)
    json.dumps(said, allow_nan=False)


@pytest.mark.parametrize(("every", "steps"), [(0, []), (1, [1, 2, 3, 4]), (3, [3])])
def test_replicas_are_compared_as_often_as_asked(monkeypatch, every: int, steps: list[int]) -> None:
    job = parse(JOB.model_dump() | {"health": {"check_replicas_every": every}})
    places: list[tuple[int, str, int]] = []
    at: list[tuple[int, str, int]] = []

    class Watched(Engine):
        def compare_replicas(self) -> Comparison | None:
            at.append(places[-1])
            return super().compare_replicas()

    engine = Watched()
    _, said, _ = run(monkeypatch, engine, job, loop.Requests(), at=lambda *place: places.append(place))
    assert at == [(step, "agree", 0) for step in steps], "who still keeps the step before is behind"
    told = [message for message in said if message["t"] == "replicas"]
    assert [message["step"] for message in told] == engine.compared == steps
    for message in told:
        assert json.loads(json.dumps(message))["differ"] == [{"group": "a", "odd": [], "digests": ["0", "1"]}]
