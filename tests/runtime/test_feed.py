"""Data for a rank while loaders come, go, hang and err: fake loaders, real batches, no Ray."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.toy import ToyRecipe

from planaria.config import parse
from planaria.data.batches import Batches
from planaria.data.errors import DataError, DataUnavailable
from planaria.layout import Layout
from planaria.recipe import BadSample, Dataset
from planaria.runtime import feed as feed_module
from planaria.runtime.asked import LoaderGone
from planaria.runtime.feed import LoaderFeed

JOB = parse({"train": {"steps": 50, "global_batch": 8, "micro_batch": 2}, "data": {"prefetch": 2, "timeout_s": 2.0}})
LAYOUT = Layout(dp_shard=2)


class Rotten:
    """The toy's samples, some of them damaged."""

    def __init__(self, whole: Dataset) -> None:
        self.whole = whole

    def __len__(self) -> int:
        return len(self.whole)

    def __getitem__(self, index: int) -> Any:
        if index % 5 == 0:
            raise BadSample(f"point/{index}", "rotten")
        return self.whole[index]


class Recipe(ToyRecipe):
    """Counts openings; ``away`` is raised by them."""

    opened = 0
    away: Exception | None = None

    def dataset(self, split: str) -> Dataset:
        self.opened += 1
        if self.away is not None:
            raise self.away
        return Rotten(super().dataset(split))


class Loader:
    """Answers at once, or with an error, or never."""

    def __init__(self) -> None:
        self.batches, self.asked, self.silent = Batches(Recipe(), JOB), 0, False
        self.error: Exception | None = None
        for method in ("build", "held_out", "held_out_size"):
            setattr(self, method, SimpleNamespace(remote=self._remote(getattr(self.batches, method))))

    def _remote(self, call: Callable[..., Any]) -> Callable[..., Future[Any]]:
        def remote(*args: int) -> Future[Any]:
            self.asked += 1
            answer: Future[Any] = Future()
            if self.error is not None:
                answer.set_exception(self.error)
            elif not self.silent:
                answer.set_result(call(*args))
            return answer

        return remote


class Stand:
    """A rank's feed, and what it may ask."""

    def __init__(self, *loaders: Loader) -> None:
        self.recipe, self.loaders, self.aborted = Recipe(), loaders, False
        self.feed = LoaderFeed(JOB, LAYOUT, 1, loaders, Batches(self.recipe, JOB), lambda: self.aborted)

    def get(self, step: int) -> Any:
        """What the rank got, compared with what every loader builds."""
        got, wanted = self.feed.get(step), Batches(Recipe(), JOB).build(step, 4, 8, 2)
        assert got.bad == wanted.bad
        assert [batch.ids for batch in got.micro_batches] == [batch.ids for batch in wanted.micro_batches]
        for one, other in zip(got.micro_batches, wanted.micro_batches, strict=True):
            assert all((one.arrays[name] == array).all() for name, array in other.arrays.items())
        return got


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Stand]]:
    monkeypatch.setattr(feed_module, "HELP_S", 0.1)
    monkeypatch.setattr(feed_module, "RETRY_PAUSE_S", 0.02)
    made: list[Stand] = []

    def make(*loaders: Loader) -> Stand:
        made.append(Stand(*loaders))
        return made[-1]

    yield make
    for one in made:
        one.feed.close()


def test_a_rank_that_has_loaders_builds_nothing_itself(stand: Callable[..., Stand]) -> None:
    one, other = Loader(), Loader()
    here = stand(one, other)
    for step in range(4):
        here.get(step)
    assert here.feed.held_out_size() == 100
    assert here.feed.held_out(0, 3, 4).batch.ids == [1, 2]
    assert here.recipe.opened == 0
    assert one.asked > 2 < other.asked


def test_without_loaders_a_rank_builds_the_same_and_later_asks_loaders_again(stand: Callable[..., Stand]) -> None:
    here = stand()
    assert any(here.get(step).bad for step in range(3)), "damage is told alike"
    assert here.feed.held_out(0, 3, 4).batch.ids == [1, 2]
    assert here.feed.held_out_size() == 100
    assert here.recipe.opened == 3, "each data set is opened once"
    back = Loader()
    here.feed.set_loaders([back])
    for step in range(3, 8):
        here.get(step)
    assert back.asked >= 3
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("own-data")]
    here.feed.close()
    assert _in_time(lambda: not [t for t in threading.enumerate() if t.name.startswith("own-data")])


def _in_time(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_what_was_asked_of_a_loader_that_is_gone_is_asked_of_another(stand: Callable[..., Stand]) -> None:
    dead, alive = Loader(), Loader()
    dead.silent = True
    here = stand(dead)
    here.feed.ask(0)
    here.feed.set_loaders([alive])
    here.get(0)
    assert (dead.asked, alive.asked) == (3, 3), "what was asked ahead, too"
    assert here.recipe.opened == 0


def test_a_rank_that_waits_when_the_last_loader_goes_builds_at_once(
    stand: Callable[..., Stand], monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = Loader()
    dead.silent = True
    here = stand(dead)
    monkeypatch.setattr(feed_module, "HELP_S", 60.0)
    timer = threading.Timer(0.05, here.feed.set_loaders, ([],))
    timer.start()
    began = time.monotonic()
    here.get(0)
    assert time.monotonic() - began < JOB.data.timeout_s / 4
    timer.join()


def test_a_lost_answer_is_asked_for_again_of_another(stand: Callable[..., Stand]) -> None:
    dead, alive = Loader(), Loader()
    dead.error = LoaderGone("ActorDiedError")
    here = stand(dead, alive)
    for step in range(4):
        here.get(step)
    assert here.recipe.opened == 0
    assert dead.asked <= 3, "it is left alone after its first failure"


def test_a_loader_that_does_not_answer_costs_one_wait_and_is_left_alone(stand: Callable[..., Stand]) -> None:
    frozen = Loader()
    frozen.silent = True
    here = stand(frozen)
    began = time.monotonic()
    for step in range(6):
        here.get(step)
    assert time.monotonic() - began < 3 * feed_module.HELP_S + 0.3
    assert frozen.asked == 3, "what was asked ahead before it was doubted"
    frozen.silent = False
    here.feed.set_loaders([frozen])
    for step in range(6, 12):
        here.get(step)
    assert frozen.asked > 5


def test_trouble_that_passes_is_tried_again(stand: Callable[..., Stand]) -> None:
    loader = Loader()
    loader.error = ConnectionResetError("server away")
    here = stand(loader)
    here.recipe.away = FileNotFoundError("no such folder")
    timer = threading.Timer(0.2, setattr, (loader, "error", None))
    timer.start()
    here.get(0)
    timer.join()
    assert here.recipe.opened > 0, "it tried to help"


def test_a_loaders_word_counts_but_not_that_of_a_node_without_the_data(stand: Callable[..., Stand]) -> None:
    loader = Loader()
    loader.error = DataError("shard", "most of it is damaged", "look at it")
    with pytest.raises(DataError, match="most of it"):
        stand(loader).feed.get(0)
    here = stand()
    here.recipe.away = DataError("/data", "no shards here", "mount it")
    began = time.monotonic()
    with pytest.raises(DataUnavailable, match="step 0: built here: /data: no shards here"):
        here.feed.get(0)
    assert time.monotonic() - began >= JOB.data.timeout_s
    here.feed.set_loaders([Loader()])
    here.get(1)


def test_an_abort_ends_the_wait(stand: Callable[..., Stand]) -> None:
    frozen = Loader()
    frozen.silent = True
    here = stand(frozen)
    here.recipe.away = FileNotFoundError("no such folder")
    timer = threading.Timer(0.1, setattr, (here, "aborted", True))
    timer.start()
    with pytest.raises(RuntimeError, match="aborted"):
        here.feed.get(0)
    timer.join()
