"""What every rank did, between two rows."""

from __future__ import annotations

from planaria.observe.environment import environment
from planaria.observe.ranks import EVERY_S, RANK_S, RankLog


def test_rows_add_up_what_was_said():
    log = RankLog(100.0)
    for step in range(3):
        log.step(7, step, 0, 0.5, 0.1)
        log.step(7, step, 0, 0.5, 0.1)  # said again, to a controller that has returned
        log.samples(0, 4)
    log.step(7, 5, 11, None, 0.25)
    log.step(7, 5, 2, 2.0, 0.0)
    assert log.take(7, 112.0) == {
        "gen": 7,
        "seconds": 12.0,
        "ranks": {"0": [3, 3, 1.5, 0.3, 12], "2": [1, 1, 2.0, 0.0, 0], "11": [1, 0, 0.0, 0.25, 0]},
    }
    assert log.take(8, 113.0) is None
    log.step(8, 1, 0, 0.5, 0.1)  # done again after a rollback
    assert log.take(8, 114.0) == {"gen": 8, "seconds": 1.0, "ranks": {"0": [1, 1, 0.5, 0.1, 0]}}


def test_large_fleets_write_more_rarely():
    log = RankLog(0.0)
    log.step(1, 0, 0, 1.0, 0.0)
    assert not log.due(EVERY_S - 0.1) and log.due(EVERY_S)
    for rank in range(1000):
        log.step(1, 1, rank, 1.0, 0.0)
    assert not log.due(EVERY_S) and log.due(1000 * RANK_S)


def test_the_environment_has_versions_and_no_variables(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    found = environment()
    assert {"planaria", "python", "torch"} <= found["versions"].keys()
    assert "hush-hush" not in str(found)
