"""The training loop at its edges, with stand-ins for engine and evaluation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from planaria.config import parse
from planaria.objectives.evaluate import Scores
from planaria.runtime import loop
from planaria.runtime.outcome import End

JOB = parse({"model": {"preset": "llava-tiny"}, "train": {"steps": 4, "global_batch": 4}})


class Scored:
    def score(self, model: Any, batch: Any) -> Any: ...


def test_an_evaluation_shows_that_it_gets_ahead(monkeypatch) -> None:
    said: list[str] = []
    order: list[str] = []

    def evaluate(engine: Any, held_out: Any, size: int, job: Any) -> Scores:
        for start in range(3):
            held_out(start, start + 1, 1)
            order.append(said[-1])
            said.clear()
        return Scores(3, 0.0, 0, 0.0, 0.0)

    monkeypatch.setattr(loop, "evaluate", evaluate)
    engine: Any = SimpleNamespace(step_done=4, recipe=Scored())
    feed: Any = SimpleNamespace(held_out=lambda *_: None, held_out_size=lambda: 3)
    keeping: Any = SimpleNamespace(checkpoint=lambda: None)
    end = loop.train(engine, feed, keeping, JOB, loop.Requests(), lambda message: said.append(message.get("phase", "")))
    assert end is End.FINISHED
    assert order == ["evaluate"] * 3


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

    def train_step(*_: Any) -> Any:
        engine.step_done += 1
        if ask:
            setattr(requests, ask, True)
        return SimpleNamespace(loss=0.0, grad_norm=0.0, lr=0.0, targets=1, skipped=False, votes=(0, 0))

    monkeypatch.setattr(loop, "_agree", lambda engine, share, wishes: (1, wishes.pause, wishes.stop))
    engine: Any = SimpleNamespace(step_done=0, recipe=None, train_step=train_step)
    share = SimpleNamespace(micro_batches=[], bad=[])
    feed: Any = SimpleNamespace(get=lambda step: share)
    keeping: Any = Keeping()
    assert loop.train(engine, feed, keeping, JOB, requests, lambda message: None) is end
    assert keeping.asked == asked
