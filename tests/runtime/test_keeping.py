"""What is kept, and when: the same decisions on every rank, from the same votes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.config import JobConfig, parse
from planaria.memory.table import Table
from planaria.runtime import keeping
from planaria.runtime.keeping import Keeping
from planaria.state.errors import CheckpointError


def job(every: int, checkpoint: int) -> JobConfig:
    tree: dict[str, Any] = {"model": {"preset": "llava-tiny"}, "train": {"steps": 40, "global_batch": 4}}
    return parse(tree | {"memory": {"every": every}, "checkpoint": {"every": checkpoint}})


class Fake:
    """Stands for one rank's engine and snapshots."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.step_done = 0
        self.joined = True
        self.newest: int | None = None
        self.complete: int | None = None
        self.settled, self.room, self.draining = True, True, False

    def state(self) -> list[Any]:
        return []

    def ready(self) -> bool:
        return self.settled and self.room

    def note_complete(self) -> None:
        self.complete = self.newest
        self.log.append(f"complete {self.newest}")

    def take(self, step: int, tensors: list[Any]) -> float:
        self.newest = step
        self.log.append(f"take {step}")
        return 0.0

    def wait_ready(self, limit_s: float, interrupted: Callable[[], bool]) -> bool:
        return self.ready()

    def wait_drained(self, limit_s: float, interrupted: Callable[[], bool]) -> bool:
        return not self.draining

    def drain(self, step: int, token: str, writer: int) -> None:
        self.log.append(f"drain {step}")
        self.draining = True


class Rank:
    def __init__(
        self,
        config: JobConfig,
        everywhere: Callable[[bool], bool] = bool,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self.log: list[str] = []
        self.said: list[dict[str, Any]] = []
        self.places: list[tuple[int, str]] = []
        self.fake: Any = Fake(self.log)
        self.keeping = Keeping(
            self.fake,
            Table.of([], {}),
            self.fake,
            config,
            "t",
            None,
            self.said.append,
            interrupted,
            everywhere,
            lambda step, phase: self.places.append((step, phase)),
        )

    def did(self) -> list[str]:
        done = self.log[:]
        self.log.clear()
        return done


@pytest.fixture(autouse=True)
def rank_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping.torch.distributed, "get_rank", lambda: 0)


@given(
    st.integers(0, 3),
    st.integers(1, 5),
    st.lists(st.lists(st.tuples(*[st.booleans()] * 3), min_size=3, max_size=3), max_size=30),
)
def test_all_ranks_decide_alike_whatever_each_one_sees(
    every: int, checkpoint: int, seen: list[list[tuple[bool, bool, bool]]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeping.torch.distributed, "get_rank", lambda: 0)
        ranks = [Rank(job(every, checkpoint)) for _ in range(3)]
        for views in seen:
            for rank, (settled, room, draining) in zip(ranks, views, strict=True):
                rank.fake.settled, rank.fake.room, rank.fake.draining = settled, room, draining
            votes = tuple(map(sum, zip(*(rank.keeping.poll() for rank in ranks), strict=True)))
            for rank in ranks:
                rank.fake.step_done += 1
                # From here on only what was voted counts.
                rank.fake.settled, rank.fake.room, rank.fake.draining = True, True, False
                rank.keeping.after_step(votes)
            assert ranks[0].log == ranks[1].log == ranks[2].log
            steps = [snapshot for snapshot in ranks[0].log if snapshot.startswith("take")]
            assert len(set(steps)) == len(steps)
            if any(not settled for settled, _, _ in views):
                due = ranks[0].fake.step_done % checkpoint == 0
                assert due or not ranks[0].did(), "one rank that is not settled holds all back"
            for rank in ranks:
                rank.log.clear()


def test_nothing_is_kept_while_replicas_differ() -> None:
    rank = Rank(job(1, 2))
    rank.fake.joined, rank.fake.step_done = False, 2
    rank.keeping.after_step((0, 0, 0))
    assert rank.did() == ["complete None"]
    rank.fake.joined, rank.fake.step_done = True, 4
    rank.keeping.after_step((0, 0, 0))
    assert "drain 4" in rank.did()


def test_a_snapshot_is_complete_only_once_all_ranks_say_so() -> None:
    rank = Rank(job(1, 100))
    rank.fake.step_done = 1
    rank.keeping.after_step((0, 0, 0))
    assert rank.did() == ["complete None", "take 1"]
    rank.fake.step_done = 2
    rank.keeping.after_step((2, 1, 0))
    assert rank.did() == []
    assert rank.keeping.complete is None
    rank.fake.step_done = 3
    rank.keeping.after_step((0, 0, 0))
    assert rank.did() == ["complete 1", "take 3"]
    assert rank.keeping.complete == 1


def test_a_snapshot_counts_as_complete_where_there_is_no_room_for_another() -> None:
    """So that what older generations left is given up, and makes the room."""
    rank = Rank(job(1, 100))
    rank.fake.settled, rank.fake.room, rank.fake.newest = True, False, 4
    assert rank.keeping.poll() == (1, 0, 0)
    rank.fake.step_done = 5
    rank.keeping.after_step((1, 0, 0))
    assert rank.did() == ["complete 4"]


def test_a_checkpoint_is_skipped_while_the_last_one_is_being_written() -> None:
    rank = Rank(job(1, 5))
    rank.fake.step_done = 5
    rank.keeping.after_step((0, 0, 1))
    assert [message["t"] for message in rank.said] == ["checkpoint_skipped"]
    assert rank.did() == ["complete None", "take 5"], "but not the snapshot"


def test_a_checkpoint_tells_the_controller_before_the_keeper() -> None:
    rank = Rank(job(1, 5))
    rank.fake.step_done = 5
    rank.fake.drain = lambda *_: rank.log.append(f"drain after {[m['t'] for m in rank.said]}")
    rank.keeping.after_step((0, 0, 0))
    assert rank.did()[-1] == "drain after ['draining']"
    assert rank.places == [(5, "checkpoint")]


def test_the_last_step_is_left_to_the_checkpoint_at_the_end() -> None:
    rank = Rank(job(1, 5))
    rank.fake.step_done = 40
    rank.keeping.after_step((0, 0, 0))
    assert "drain 40" not in rank.did()
    rank.keeping.checkpoint()
    assert rank.did() == ["drain 40"], "the snapshot is there already"
    rank.keeping.checkpoint()
    assert rank.did() == [], "nor is it written twice"


def test_a_snapshot_that_must_be_is_taken_once_all_ranks_are_ready() -> None:
    """Otherwise a fast rank would overwrite what the step before needs to be complete."""
    barrier, votes = threading.Barrier(2), [True, True]

    def everywhere_for(at: int) -> Callable[[bool], bool]:
        def everywhere(here: bool) -> bool:
            votes[at] = here
            barrier.wait(10)
            found = all(votes)
            barrier.wait(10)
            if not here:
                ranks[at].fake.settled = True  # a moment later
            return found

        return everywhere

    ranks = [Rank(job(1, 100), everywhere_for(at)) for at in range(2)]
    for rank in ranks:
        rank.fake.step_done, rank.fake.newest = 7, 6
    ranks[1].fake.settled = False
    threads = [threading.Thread(target=rank.keeping.snapshot) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    for rank in ranks:
        assert rank.did() == ["complete 6", "take 7"]
        assert rank.places == [(7, "checkpoint")], "told while waiting: nobody hangs"


def test_waiting_for_memory_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "WAIT_S", 0.0)
    rank = Rank(job(1, 100))
    rank.fake.step_done, rank.fake.room = 7, False
    with pytest.raises(CheckpointError, match=r"step 7 could not be kept.*memory for it did not become free"):
        rank.keeping.snapshot()
    rank.fake.room, rank.fake.draining = True, True
    with pytest.raises(CheckpointError, match="the one before is still being written"):
        rank.keeping.checkpoint()


def test_waiting_ends_when_the_generation_is_aborted() -> None:
    rank = Rank(job(1, 100), interrupted=lambda: True)
    rank.fake.step_done, rank.fake.room = 7, False
    with pytest.raises(RuntimeError, match="aborted"):
        rank.keeping.snapshot()
