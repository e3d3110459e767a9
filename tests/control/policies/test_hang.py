"""Hangs: no false alarm, and the right one to blame."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.config import parse
from planaria.control.policies.hang import BEFORE, FACTOR, FEWEST, WITHIN, Hang, HangLimits, Word, again, watch

LIMITS = HangLimits(silence_s=20, ceiling_s=300, data_s=150, floor_s=10, restore_s=1800)
STEPS = [2.0] * 10  # so the limit is 20 s
GENERATION = 3


def word(rank: int, phase: str = "agree", step: int = 7, at: float = 0.0, micro: int = 0, **other) -> Word:
    fields = {"member": f"worker-{rank}", "node": f"node{rank // 2}", "generation": GENERATION, "beat": 1e9}
    return Word(step=step, phase=phase, at=at, micro=micro, **(fields | other))


def world(*words: Word) -> dict[int, Word]:
    return {int(item.member.rpartition("-")[2]): item for item in words}


def look(words, now, step_s=STEPS, first=False, limits=LIMITS, began=0.0) -> Hang | None:
    return watch(words, GENERATION, began, step_s, first, now, limits)


# Limits


def test_limits_follow_the_step_times_between_floor_and_ceiling():
    assert LIMITS.of_phase("step", STEPS, False) == 20
    assert LIMITS.of_phase("step", [0.01] * 9, False) == 10
    assert LIMITS.of_phase("step", [100.0] * 9, False) == 300
    assert LIMITS.of_phase("step", [2.0] * 8 + [500.0] * 3, False) == 20  # a few slow steps change nothing


@pytest.mark.parametrize(
    ("phase", "steps", "first", "expected"),
    [
        ("step", [2.0] * (FEWEST - 1), False, 300),
        ("step", STEPS, True, 300),
        ("checkpoint", STEPS, False, 300),
        ("evaluate", STEPS, False, 300),
        ("forming", STEPS, True, 300),
        ("building", STEPS, True, 1800),
        ("restoring", STEPS, True, 1800),
        ("data", STEPS, False, 150),
        ("data", [29.0] * 9, False, 290),
        ("reduce", STEPS, False, 20),
        ("a phase of the future", STEPS, False, 20),
    ],
)
def test_what_takes_long_by_its_nature_gets_time(phase, steps, first, expected):
    assert LIMITS.of_phase(phase, steps, first) == expected


def test_limits_from_the_job():
    job = parse(
        {
            "model": {"preset": "llava-tiny"},
            "train": {"steps": 9, "global_batch": 2},
            "elastic": {"hang_s": 5, "silence_s": 3},
            "data": {"timeout_s": 1},
        }
    )
    assert HangLimits.of(job) == HangLimits(silence_s=3, ceiling_s=5, data_s=2.5, floor_s=5, restore_s=1800)


# Who


def test_nobody_is_there():
    assert look({}, 1e6) is None


def test_the_one_behind_is_to_blame_and_not_those_who_wait():
    words = world(word(0, at=1), word(1, "step", micro=1, step=6, at=0.5), word(2, at=1), word(3, at=1))
    assert look(words, 20.4) is None
    hang = look(words, 20.6)
    assert hang is not None
    assert (hang.culprits, hang.kind, hang.phase, hang.step) == ((1,), "behind", "step", 6)
    assert hang.why == (
        "rank 1 (worker-1 on node0) stuck in step of step 6, micro-batch 1: 20 s without progress (limit 20 s)"
    )


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        (("restoring", 9, 0), ("data", 7, 0)),
        (("data", 7, 0), ("agree", 7, 0)),
        (("agree", 7, 0), ("step", 7, 0)),
        (("step", 7, 1), ("step", 7, 2)),
        (("step", 7, 9), ("reduce", 7, 0)),
        (("reduce", 7, 0), ("update", 7, 0)),
        (("keep", 7, 0), ("data", 8, 0)),
        (("checkpoint", 7, 0), ("evaluate", 7, 0)),
        (("evaluate", 9, 1), ("evaluate", 9, 2)),
    ],
)
def test_order_of_places(slower, faster):
    (p, s, m), (q, t, n) = slower, faster
    assert word(0, p, s, micro=m).place < word(0, q, t, micro=n).place
    hang = look(world(word(0, p, s, micro=m), word(1, q, t, micro=n), word(2, q, t, micro=n)), 2000)
    assert hang is not None
    assert hang.culprits == (0,)


def test_whoever_is_behind_but_gets_on_is_waited_for():
    """The others have waited for 100 s; the slow one came to its micro-batch just now."""
    assert look(world(word(0, at=0), word(1, "step", 6, micro=2, at=95)), 100) is None


def test_of_several_behind_the_last_to_come_there_is_waited_for():
    words = world(word(0, at=0), word(1, "step", 6, at=0), word(2, "step", 6, at=15), word(3, at=0))
    assert look(words, 30) is None
    hang = look(words, 36)
    assert hang is not None
    assert hang.culprits == (1, 2)


def test_waiting_for_one_who_may_take_long_is_no_hang():
    for phase in ("data", "checkpoint"):
        words = world(word(0, "evaluate", 7, at=0), word(1, phase, 7, at=0))
        assert look(words, 140) is None
    assert look(world(word(0, "agree", 0), word(1, "restoring", 0)), 1700, first=True) is None


def test_all_equally_far_is_a_deadlock_without_a_culprit():
    hang = look(world(*(word(rank) for rank in range(4))), 21)
    assert hang is not None
    assert (hang.culprits, hang.kind) == ((), "deadlock")
    assert hang.why == "all ranks in agree of step 7: 21 s without progress (limit 20 s)"


def test_a_majority_behind_is_not_to_blame():
    """One rank left the broken collective first: the three are no culprits."""
    words = world(*(word(rank, "reduce") for rank in range(3)), word(3, "update"))
    hang = look(words, 21)
    assert hang is not None
    assert (hang.culprits, hang.kind) == ((), "deadlock")
    half = look(world(word(0, "reduce"), word(1, "reduce"), word(2, "update"), word(3, "update")), 21)
    assert half is not None
    assert half.culprits == (0, 1)


def test_silence_comes_first():
    words = world(word(0, beat=79.9), word(1, beat=90), word(2, "data", 6, beat=100))
    hang = look(words, 100)
    assert hang is not None
    assert (hang.culprits, hang.kind) == ((0,), "silent")
    assert "rank 0 (worker-0 on node0) silent for more than 20 s, last heard in agree of step 7" in hang.why


def test_all_silent_condemns_nobody():
    hang = look(world(word(0, beat=1), word(1, beat=2)), 100)
    assert hang is not None
    assert (hang.culprits, hang.kind) == ((), "silent")


def test_a_word_of_an_earlier_generation_is_not_yet_begun():
    words = world(word(0, at=100), word(1, "evaluate", step=99, generation=GENERATION - 1, at=100))
    assert look(words, 395, began=100, first=True) is None
    hang = look(words, 401, began=100, first=True)
    assert hang is not None
    assert (hang.culprits, hang.phase) == ((1,), "forming")


# Again


def test_a_second_hang_at_the_same_place_blames_who_was_in_both():
    first = look(world(*(word(rank) for rank in range(4))), 21)
    # All but one process were replaced since.
    words = world(word(0), *(replace(word(rank), member=f"worker-{rank + 10}") for rank in range(4, 7)))
    second = look(words, 21)
    assert first is not None and second is not None
    found = again(second, [first], words)
    assert found.culprits == (0,)
    assert "worker-0 on node0 alone was part of the same hang before" in found.why


def test_the_same_membership_or_another_place_blames_nobody():
    words = world(*(word(rank) for rank in range(4)))
    first, elsewhere = look(words, 21), look(world(*(word(rank, step=8) for rank in range(4))), 21)
    assert first is not None and elsewhere is not None
    assert again(first, [first], words) == first
    moved = world(word(0), *(replace(word(rank), node="other") for rank in range(1, 4)))
    second = look(moved, 21)
    assert second is not None
    assert again(second, [elsewhere], moved).culprits == ()
    assert again(second, [elsewhere, first], moved).culprits == (0,)


def test_a_hang_with_a_culprit_stays_as_it_is():
    words = world(word(0), word(1, "data"), word(2))
    hang = look(words, 151)
    assert hang is not None
    assert hang.culprits == (1,)
    assert again(hang, [replace(hang, seats=frozenset({("worker-2", "node1")}))], words) == hang


# Properties


@st.composite
def worlds(draw):
    count = draw(st.integers(1, 6))
    return {
        rank: word(
            rank,
            draw(st.sampled_from(BEFORE + WITHIN)),
            draw(st.integers(0, 3)),
            at=draw(st.floats(0, 2000)),
            micro=draw(st.integers(0, 2)),
            generation=draw(st.sampled_from([GENERATION, GENERATION, GENERATION - 1])),
            beat=draw(st.floats(0, 2000)),
        )
        for rank in range(count)
    }


STEP_TIMES = st.lists(st.floats(0.01, 100), max_size=12)


@given(worlds(), STEP_TIMES, st.booleans(), st.floats(0, 4000))
def test_no_alarm_while_every_word_and_beat_is_younger_than_its_limit(words, step_s, first, now):
    def age(item: Word) -> float:
        return now - (item.at if item.generation == GENERATION else 0.0)

    young = all(
        age(item) <= LIMITS.of_phase(item.phase if item.generation == GENERATION else "forming", step_s, first)
        and now - max(item.beat, item.at) <= LIMITS.silence_s
        for item in words.values()
    )
    hang = look(words, now, step_s, first)
    if young:
        assert hang is None
    if hang is not None:
        assert set(hang.culprits) <= set(words)
        assert hang.kind == "silent" or 2 * len(hang.culprits) <= len(words)
        assert {words[rank].seat for rank in hang.culprits} <= hang.seats


@given(worlds(), STEP_TIMES, st.booleans())
def test_every_hang_is_found_in_the_end(words, step_s, first):
    assert look(words, 2000 + 1801, step_s, first) is not None


@given(st.lists(st.floats(0.01, 1000), min_size=FEWEST), st.sampled_from(WITHIN))
def test_no_limit_is_below_the_usual_step_nor_above_the_ceiling(step_s, phase):
    limit = LIMITS.of_phase(phase, step_s, False)
    usual = sorted(step_s)[len(step_s) // 2 if len(step_s) % 2 else len(step_s) // 2 - 1]
    assert min(LIMITS.ceiling_s, FACTOR * usual, LIMITS.floor_s) <= limit <= LIMITS.ceiling_s
    assert limit >= min(FACTOR * usual, LIMITS.ceiling_s)
