"""Checkpoints on their way to storage: complete or not at all, and always answered."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import pytest
import torch

from planaria.control.drains import Drains
from planaria.control.events import Saved
from planaria.state.boxes import Box, shard_rows
from planaria.state.vault import Vault
from planaria.state.writer import Piece

NODES = ("n0", "n0", "n1")
WHOLE = torch.arange(24.0).reshape(6, 4)


class Attempts:
    """The controller's end and the keepers' end of some attempts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.vault = Vault(folder)
        self.heard: queue.Queue[Saved] = queue.Queue()
        self.drains = Drains(self.vault, self.heard.put)

    def begin(self, step: int = 5, generation: int = 1) -> None:
        self.drains.begin(generation, step, f"run-{generation}", NODES, {"layout": "dp_shard3"})

    def drained(self, writer: int, step: int = 5, generation: int = 1) -> dict[str, Any]:
        """Write a shard; what its keeper says then."""
        box = shard_rows(WHOLE.shape, writer, 3)
        piece = Piece("w", (6, 4), box, WHOLE[box.relative_to(Box.whole(WHOLE.shape))])
        slices = self.vault.writer(step, f"run-{generation}").write_shard(writer, [piece])
        return self.word("drained", writer, step, generation) | {
            "slices": [item.to_json() for item in slices],
            "expected": {"w": [6, 4]} if writer == 0 else None,
        }

    def word(self, kind: str, writer: int, step: int = 5, generation: int = 1) -> dict[str, Any]:
        names = {"gen": generation, "owner": f"worker-{writer}", "step": step, "token": f"run-{generation}"}
        return {"t": kind, "writer": writer, "problem": "the disk is full", **names}

    def answer(self) -> Saved:
        """The next end of an attempt, as the controller takes it."""
        event = self.heard.get(timeout=10)
        self.drains.over(event)
        return event

    def steps(self) -> list[int]:
        return [info.step for info in self.vault.list("deep") if info.intact]

    def leftovers(self) -> list[str]:
        folder = self.folder / "checkpoints"
        return [path.name for path in folder.iterdir() if ".tmp-" in path.name] if folder.exists() else []


@pytest.fixture
def attempts(tmp_path: Path) -> Attempts:
    return Attempts(tmp_path)


def test_the_commit_comes_after_all_shards_and_not_before(attempts: Attempts) -> None:
    attempts.begin()
    for writer in (2, 0):
        attempts.drains.take(attempts.drained(writer))
        attempts.drains.take(attempts.drained(writer))  # said twice
    assert attempts.heard.empty()
    assert not attempts.steps()
    assert attempts.drains.pending(1)
    attempts.drains.take(attempts.drained(1))
    event = attempts.answer()
    assert (event.generation, event.step, event.problem) == (1, 5, None)
    assert attempts.steps() == [5]
    assert not attempts.drains.pending()
    with attempts.vault.at(5) as checkpoint:
        assert torch.equal(checkpoint.read("w", Box.whole((6, 4))), WHOLE)


def test_a_failed_shard_ends_the_attempt_and_removes_it(attempts: Attempts) -> None:
    attempts.begin()
    attempts.drains.take(attempts.drained(0))
    attempts.drains.take(attempts.word("drain_failed", 1))
    assert attempts.answer().problem == "the disk is full"
    assert not attempts.steps()
    assert not attempts.leftovers()


def test_a_lost_node_ends_the_attempts_that_it_had_to_write_for(attempts: Attempts) -> None:
    attempts.begin(step=5)
    attempts.begin(step=6)
    attempts.drains.take(attempts.drained(2, step=6))
    attempts.drains.lost("n9")
    assert attempts.heard.empty()
    attempts.drains.lost("n1")
    event = attempts.answer()
    assert event.step == 5
    assert "n1 was lost" in str(event.problem)
    for writer in (0, 1):  # n1 had written its part of step 6
        attempts.drains.take(attempts.drained(writer, step=6))
    assert attempts.answer().problem is None
    assert attempts.steps() == [6]


def test_late_words_of_an_attempt_that_is_over_change_nothing(attempts: Attempts) -> None:
    attempts.begin()
    attempts.drains.take(attempts.word("drain_failed", 0))
    attempts.answer()
    for writer in range(3):
        attempts.drains.take(attempts.word("drained", writer) | {"slices": [], "expected": None})
    attempts.begin()  # a slow rank says only now that it writes
    assert not attempts.drains.pending()
    assert attempts.heard.empty()


def test_words_of_keepers_that_come_before_those_of_ranks_count(attempts: Attempts) -> None:
    """They come on different connections, from different machines."""
    for writer in range(3):
        attempts.drains.take(attempts.drained(writer))
    attempts.begin()
    assert attempts.answer().problem is None
    assert attempts.steps() == [5]


def test_an_early_failure_counts_too(attempts: Attempts) -> None:
    attempts.drains.take(attempts.word("drain_failed", 2))
    attempts.begin()
    assert attempts.answer().problem == "the disk is full"


def test_words_of_an_earlier_generation_do_not_complete_a_later_one(attempts: Attempts) -> None:
    attempts.drains.take(attempts.drained(0, generation=1))
    attempts.begin(generation=2)
    for writer in (1, 2):
        attempts.drains.take(attempts.drained(writer, generation=2))
    assert attempts.heard.empty()
    attempts.drains.take(attempts.drained(0, generation=2))
    assert attempts.answer().generation == 2


def test_an_incomplete_state_is_not_committed_and_is_answered(attempts: Attempts) -> None:
    attempts.begin()
    for writer in range(3):
        message = attempts.drained(writer)
        attempts.drains.take(message | ({"slices": []} if writer == 1 else {}))
    assert "missing" in str(attempts.answer().problem)
    assert not attempts.steps()
    assert not attempts.leftovers()


def test_whatever_goes_wrong_in_a_commit_is_answered(attempts: Attempts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Vault, "writer", lambda *_: 1 / 0)
    attempts.begin(step=5)
    attempts.drains.take(attempts.word("drain_failed", 0, step=5))
    attempts.begin(step=6)
    for writer in range(3):
        words = attempts.word("drained", writer, step=6)
        attempts.drains.take(words | {"slices": [{"nonsense": 1}], "expected": None})
    assert {"ZeroDivisionError" in str(attempts.answer().problem) for _ in range(2)} == {True}
    assert not attempts.drains.pending()


def test_attempts_are_told_apart_by_generation(attempts: Attempts) -> None:
    attempts.begin(generation=1)
    attempts.begin(generation=2)
    assert attempts.drains.pending(1)
    assert attempts.drains.pending(2)
    attempts.drains.take(attempts.word("drain_failed", 0, generation=1))
    attempts.answer()
    assert not attempts.drains.pending(1)
    assert attempts.drains.pending(2)
    assert not attempts.drains.pending(3)


def test_a_keeper_is_waited_for_until_its_last_shard_is_there(attempts: Attempts) -> None:
    attempts.begin()
    assert attempts.drains.waits_for("n0")
    attempts.drains.take(attempts.drained(0))
    assert attempts.drains.waits_for("n0"), "its other rank's shard is missing"
    attempts.drains.take(attempts.drained(1))
    assert not attempts.drains.waits_for("n0")
    assert attempts.drains.waits_for("n1")
    attempts.drains.lost("n1")
    assert not attempts.drains.waits_for("n1"), "the attempt is over"
    assert attempts.answer().problem
