"""The word that says where a rank is."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from planaria.runtime.progress import BEFORE, WITHIN, Place, Progress

LIMIT_S = 10.0
Words = queue.Queue[dict[str, Any]]


@pytest.fixture
def line() -> Iterator[tuple[Progress, Words]]:
    said: Words = queue.Queue()
    progress = Progress(said.put, 7, every_s=0.01)
    yield progress, said
    progress.close()


def test_a_rank_that_is_stuck_has_told_where(line: tuple[Progress, Words]) -> None:
    progress, said = line
    assert said.get(timeout=LIMIT_S) == {"t": "phase", "step": 7, "phase": "forming"}
    for micro in range(4):
        progress.at(7, "step", micro)
    while (word := said.get(timeout=LIMIT_S)).get("micro") != 3:
        pass
    assert word == {"t": "phase", "step": 7, "phase": "step", "micro": 3}
    place, seconds = progress.where()
    assert place == Place.of(7, "step", 3) and seconds >= 0.0


def test_a_word_is_told_once_unless_it_is_said_again(line: tuple[Progress, Words]) -> None:
    """Who waits, and goes on asking, is not stuck."""
    progress, said = line
    said.get(timeout=LIMIT_S)
    with pytest.raises(queue.Empty):
        said.get(timeout=0.2)
    for _ in range(2):
        progress.at(7, "checkpoint")
        assert said.get(timeout=LIMIT_S)["phase"] == "checkpoint"


def test_the_begin_of_an_evaluation_is_told_at_once_and_its_micro_batches_are_not() -> None:
    said: Words = queue.Queue()
    progress = Progress(said.put, 9, every_s=1000.0)
    for phase in ("data", "step", "keep", "checkpoint", "evaluate"):
        progress.at(9, phase)
    for micro in range(1, 4):
        progress.at(9, "evaluate", micro)
    assert [said.get_nowait()["phase"] for _ in range(2)] == ["checkpoint", "evaluate"]
    assert said.empty()
    progress.close()


def test_nothing_is_said_and_no_thread_is_left_after_the_end() -> None:
    said: Words = queue.Queue()
    before = threading.active_count()
    progress = Progress(said.put, 0, every_s=0.01)
    progress.close()
    assert threading.active_count() == before
    while not said.empty():
        said.get()
    progress.at(1, "data")
    with pytest.raises(queue.Empty):
        said.get(timeout=0.1)


def test_places_order_ranks_by_how_far_they_are() -> None:
    ahead = [Place.of(3, phase) for phase in (*BEFORE, *WITHIN)]
    ahead += [Place.of(4, "data"), Place.of(4, "step", 0), Place.of(4, "step", 1), Place.of(4, "reduce")]
    ahead.append(Place.of(5, "data"))
    assert ahead == sorted(ahead) and len(set(ahead)) == len(ahead)
    assert Place.read({"t": "phase", "step": 4, "phase": "step", "micro": 1}) == Place.of(4, "step", 1)
    assert str(Place.of(4, "step", 1)) == "step 4, step, micro-batch 1"


def test_a_phase_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="no phase 'lunch'"):
        Place.of(1, "lunch")
