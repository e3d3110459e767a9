"""Windows that are left out: what training consumes is everything else, once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.config import parse
from planaria.data.skips import Windows, batch_of, normalised, same_past, without_steps
from planaria.layout import Layout
from planaria.runtime.feed import LoaderFeed

OWN: Any = None  # there is a loader
windows = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)).map(lambda w: (w[0], w[0] + w[1])), max_size=5)
STEPS = 40


def members(skips: Any) -> set[int]:
    return {batch for first, last in skips for batch in range(first, last + 1)}


@given(windows)
def test_steps_consume_what_is_left_in_order(skips: list[tuple[int, int]]) -> None:
    left = [batch for batch in range(200) if batch not in members(skips)]
    assert [batch_of(step, skips) for step in range(STEPS)] == left[:STEPS]


@given(windows)
def test_windows_are_normalised_without_a_change(skips: list[tuple[int, int]]) -> None:
    found = normalised(skips)
    assert members(found) == members(skips)
    assert normalised(found) == normalised(tuple(skips[::-1])) == found
    assert all(first <= last for first, last in found)
    assert all(found[at][1] + 1 < found[at + 1][0] for at in range(len(found) - 1))


@given(windows, st.integers(0, 30), st.integers(0, 9))
def test_a_further_window_is_given_in_steps_as_they_are_counted_now(
    skips: list[tuple[int, int]], first: int, more: int
) -> None:
    now = without_steps(skips, first, first + more)
    assert members(now) >= members(skips)
    # Nothing but the window goes: before it all stays, after it the rest follows in its order.
    straight = [batch_of(step, skips) for step in range(STEPS + 10)]
    del straight[first : first + more + 1]
    assert [batch_of(step, now) for step in range(STEPS)] == straight[:STEPS]


@given(windows, windows, st.integers(0, STEPS))
def test_a_state_is_usable_if_it_consumed_what_the_windows_say(
    before: list[tuple[int, int]], now: list[tuple[int, int]], step: int
) -> None:
    consumed, wanted = ([batch_of(t, skips) for t in range(step)] for skips in (before, now))
    assert same_past(step, before, now) == (consumed == wanted)


@given(windows, st.integers(0, STEPS), st.integers(0, 30), st.integers(0, 9))
def test_after_a_roll_back_only_states_up_to_the_window_are_usable(
    skips: list[tuple[int, int]], step: int, first: int, more: int
) -> None:
    assert same_past(step, skips, without_steps(skips, first, first + more)) == (step <= first)


class Loader:
    """Remembers what a loader was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int, int]] = []
        self.build = SimpleNamespace(remote=lambda *request: self.asked.append(request))


@given(windows, st.lists(st.tuples(st.integers(1, 7), st.integers(1, 6)), min_size=1, max_size=4))
def test_every_sample_once_but_for_the_windows_in_whatever_worlds(
    skips: list[tuple[int, int]], worlds: list[tuple[int, int]]
) -> None:
    """A run whose world changes every few steps, as the loaders see it."""
    batch, steps = 5, sum(length for _, length in worlds)
    job = parse({"train": {"steps": steps, "global_batch": batch, "micro_batch": 2}, "data": {"prefetch": 1}})
    positions: list[int] = []
    done = 0
    for dp, length in worlds:
        for rank in range(dp):
            loader = Loader()
            feed = LoaderFeed(job, Layout(dp_shard=dp), rank, [loader], OWN, lambda: False, normalised(skips))
            for step in range(done, done + length):
                feed.ask(step)
                feed._pending.pop(step)
            asked = loader.asked[:length]  # what was asked ahead of the last step is thrown away
            positions += [number * batch + offset for number, lo, hi, _ in asked for offset in range(lo, hi)]
        done += length
    left = [number for number in range(steps + 200) if number not in members(skips)][:steps]
    assert sorted(positions) == [number * batch + offset for number in left for offset in range(batch)]


@pytest.mark.parametrize("skips", [((-1, 3),), ((4, 2),)])
def test_nonsense_is_refused(skips: Windows) -> None:
    with pytest.raises(ValueError, match="are not a window"):
        batch_of(0, skips)


def test_steps_must_be_steps() -> None:
    with pytest.raises(ValueError, match="negative"):
        batch_of(-1, ())
    with pytest.raises(ValueError, match="backwards"):
        without_steps((), 4, 3)
    assert without_steps(((2, 3),), 2, 2) == ((2, 4),)
