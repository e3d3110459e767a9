"""The pure parts of the benchmarks: figures from logs, the JSON format, the rendered page."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import psutil
import pytest

import recovery
import render
from _measure import NoRecovery, Step, measure
from _peers.work import Work
from _report import Report, Spread, Table, number, ratio, spread
from _runs import last_words, scratch


def steps(first: int, last: int, start: float, incarnation: str, pace: float = 1.0) -> list[Step]:
    return [Step(n, start + pace * (n - first), incarnation) for n in range(first, last + 1)]


def test_recovery_counts_from_the_kill_to_the_first_step_of_the_new_incarnation():
    log = steps(1, 25, 1.0, "a") + steps(21, 30, 40.0, "b", pace=0.5)
    found = measure(log, killed_at=25.5)
    assert found.recovery_seconds == pytest.approx(14.5)
    assert found.steps_lost == 5
    assert found.caught_up_seconds == pytest.approx(17.0)  # step 26
    assert found.step_seconds == pytest.approx(1.0)


def test_a_step_in_flight_at_the_kill_does_not_count():
    log = [*steps(1, 25, 1.0, "a"), Step(26, 25.51, "a"), *steps(21, 27, 40.0, "b")]
    found = measure(log, killed_at=25.5)
    assert found.recovery_seconds == pytest.approx(14.5)
    assert found.steps_lost == 5  # step 26 was not completed before the kill
    assert found.caught_up_seconds == pytest.approx(20.5)  # but it was done once: 27 is the first new one


def test_nothing_lost_when_the_state_survives():
    log = steps(1, 25, 1.0, "a") + steps(26, 27, 26.5, "b")
    found = measure(log, killed_at=25.5)
    assert (found.steps_lost, found.recovery_seconds, found.caught_up_seconds) == (0, 1.0, 1.0)
    kept_in_flight = [*steps(1, 25, 1.0, "a"), Step(26, 25.6, "a"), Step(27, 26.5, "b")]
    assert measure(kept_in_flight, killed_at=25.5).steps_lost == 0


def test_incarnations_before_the_fault_are_all_old():
    log = steps(1, 5, 1.0, "a") + steps(4, 12, 6.0, "b") + [Step(13, 14.2, "a")] + steps(11, 14, 20.0, "c")
    found = measure(log, killed_at=14.1)
    assert found.recovery_seconds == pytest.approx(5.9)
    assert found.steps_lost == 2


def test_no_recovery_is_said():
    with pytest.raises(NoRecovery, match="after the kill"):
        measure(steps(1, 5, 1.0, "a"), killed_at=10.0)
    with pytest.raises(NoRecovery, match="before the kill"):
        measure(steps(1, 5, 11.0, "a"), killed_at=10.0)
    unfinished = steps(1, 9, 1.0, "a") + steps(6, 7, 20.0, "b")
    assert measure(unfinished, killed_at=9.5).caught_up_seconds is None


def test_spread_ratio_and_numbers():
    assert spread([3.0, None, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    assert spread([None]) is None
    assert str(spread([1.25, 0.5, 20.0])) == "1.25 (0.50 to 20)"
    assert str(spread([5, 5])) == "5"
    assert ratio(spread([30.0]), spread([1.5])) == 20.0
    assert ratio(None, spread([1.5])) is None
    assert [number(value) for value in (0.123, 12.34, 123.4, 4.0)] == ["0.12", "12.3", "123", "4"]


def rows() -> list[dict]:
    def row(name: str, turn: int, seconds: float, lost: int) -> dict:
        figures = {
            "recovery_seconds": seconds,
            "caught_up_seconds": seconds + 1,
            "steps_lost": lost,
            "step_seconds": 0.3,
        }
        return {"contender": name, "round": turn} | figures

    ours = [row("planaria", turn, seconds, 5) for turn, seconds in ((1, 1.0), (2, 2.0), (3, 1.5))]
    ours[0]["phases"] = {"detect": 0.05, "abort": 0.1}
    peers = [row("ray-train", turn, seconds, 5) for turn, seconds in ((1, 40.0), (2, 20.0), (3, 30.0))]
    return [*ours, *peers, {"contender": "torchrun", "round": 1, "absent": "exit code 1: ImportError: gone"}]


def test_the_report_of_the_recovery_benchmark(tmp_path):
    report = recovery.build_report(rows(), Work(""), "2026-01-31")
    assert report.figures == {"recovery_seconds": 1.5, "recovery_vs_ray_train": 20.0, "steps_lost": 5}
    file = tmp_path / "recovery.json"
    report.write(file)
    tree = json.loads(file.read_text())
    assert {"machine", "versions", "settings", "rows", "figures"} <= set(tree)
    assert {"cores", "memory_gib", "cpu"} <= set(tree["machine"])
    assert Report.read(file).figures == report.figures
    assert list(tmp_path.iterdir()) == [file]
    report.print()


def test_the_page_shows_figures_settings_and_who_is_absent(tmp_path):
    recovery.build_report(rows(), Work(""), "2026-01-31").write(tmp_path / "in" / "recovery.json")
    page = tmp_path / "docs" / "benchmarks.md"
    assert render.main(str(tmp_path / "in"), str(page)) == 0
    text = page.read_text()
    assert "| recovery_vs_ray_train | 20 |" in text
    assert "| ray-train | 30 (20 to 40) |" in text
    assert "| torchrun | 1 | exit code 1: ImportError: gone |" in text
    assert "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S" in text and "keep_alive_interval" in text
    assert "2026-01-31" in text


def test_damaged_or_missing_reports_are_named(tmp_path, capsys):
    assert render.main(str(tmp_path), str(tmp_path / "page.md")) == 1
    assert "holds no benchmark reports" in capsys.readouterr().err
    bad = tmp_path / "bad.json"
    bad.write_text(
        '{"machine": {}, "versions": {}, "settings": {}, "rows": [], "figures": {"x": "fast"}, "tables": []}'
    )
    assert render.main(str(tmp_path), str(tmp_path / "page.md")) == 1
    assert "bad.json" in (said := capsys.readouterr().err) and "figure x is 'fast'" in said


def test_a_table_must_be_filled():
    with pytest.raises(ValueError, match="does not fill"):
        Table("t", ("a", "b"), [["only one"]])


def test_reasons_hold_no_paths(tmp_path):
    output = tmp_path / "output.txt"
    output.write_text("Traceback\nFileNotFoundError: [Errno 2] No such file: '/some/where/file.txt'\nbye\n")
    assert last_words(output) == "FileNotFoundError: [Errno 2] No such file: 'PATH'"


def test_a_run_leaves_nothing_behind():
    # An orphan in a session of its own, which the run's own process has left behind.
    orphan = "import subprocess, sys; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    with scratch() as (folder, environment):
        subprocess.run([sys.executable, "-c", orphan], env=environment, check=True)
        (folder / "file").write_text("x")
        deadline = time.monotonic() + 10
        while not (found := [p for p in psutil.Process().children() if p.name() == "sleep"]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert not folder.exists()
    assert not any(process.is_running() for process in found)
