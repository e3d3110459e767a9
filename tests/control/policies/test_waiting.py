"""Waiting for workers: long enough, and not for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planaria.config import ElasticConfig
from planaria.control.policies.decisions import GiveUp
from planaria.control.policies.waiting import Start, Wait, wait


def limits(low: int = 2, high: int = 8, wait_s: float = 60) -> ElasticConfig:
    return ElasticConfig(min_workers=low, max_workers=high, wait_s=wait_s)


def test_wait_starts_at_once_when_all_are_there():
    assert wait(8, 0, limits(), settle_s=5) == Start(8)
    assert wait(11, 0, limits(), settle_s=5) == Start(8)


def test_wait_lets_a_starting_cluster_settle():
    assert wait(3, 1, limits(), settle_s=5, quiet_s=1) == Wait(4)
    assert wait(3, 6, limits(), settle_s=5, quiet_s=5) == Start(3)
    assert wait(3, 0, limits()) == Start(3)


def test_workers_alone_do_not_start_and_are_not_waited_with_for_ever():
    assert wait(8, 10, limits(wait_s=60), data=False) == Wait(50)
    late = wait(8, 60, limits(wait_s=60), data=False)
    assert isinstance(late, GiveUp)
    assert "no data loader" in late.reason


def test_wait_settles_no_longer_than_its_limit():
    assert wait(3, 58, limits(wait_s=60), settle_s=5, quiet_s=0) == Wait(2)
    assert wait(3, 60, limits(wait_s=60), settle_s=5, quiet_s=0) == Start(3)


def test_wait_for_the_least_number():
    assert wait(1, 12.5, limits(wait_s=60)) == Wait(47.5)
    assert wait(1, 60, limits(wait_s=60)) == GiveUp(
        "only 1 of the elastic.min_workers=2 workers came within elastic.wait_s=60 s; "
        "add nodes, or lower elastic.min_workers"
    )


@given(st.integers(0, 12), st.floats(0, 100), st.floats(0, 20), st.floats(0, 100))
def test_wait_never_starts_out_of_limits_nor_waits_past_the_limit(ready, waited, settle, quiet):
    decision = wait(ready, waited, limits(), settle, quiet)
    match decision:
        case Start(workers):
            assert 2 <= workers <= min(ready, 8)
        case Wait(seconds):
            assert 0 < seconds <= 60 - waited
        case GiveUp():
            assert ready < 2
            assert waited >= 60
