"""The training loop at its edges, with stand-ins for engine and evaluation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

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
    nothing: Any = None
    end = loop.train(
        engine, feed, nothing, JOB, loop.Requests(), lambda message: said.append(message.get("phase", "")), "token"
    )
    assert end is End.FINISHED
    assert order == ["evaluate"] * 3


def test_a_pause_that_cannot_be_saved_does_not_happen(monkeypatch) -> None:
    saves: list[bool] = []

    def save(*_: Any, must: bool) -> bool:
        saves.append(must)
        return must

    def train_step(*_: Any) -> Any:
        engine.step_done += 1
        requests.pause |= engine.step_done == 1
        return SimpleNamespace(loss=0.0, grad_norm=0.0, lr=0.0, targets=1, skipped=False)

    monkeypatch.setattr(loop, "save", save)
    monkeypatch.setattr(loop, "_agree", lambda engine, share, asked: (1, asked.pause, asked.stop))
    engine: Any = SimpleNamespace(step_done=0, recipe=None, train_step=train_step)
    share = SimpleNamespace(micro_batches=[], bad=[])
    feed: Any = SimpleNamespace(get=lambda step: share)
    nothing: Any = None
    requests = loop.Requests()
    assert loop.train(engine, feed, nothing, JOB, requests, lambda message: None, "token") is End.FINISHED
    assert saves == [False, True]  # at the pause, and at the end
    assert engine.step_done == 4
