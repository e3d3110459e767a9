"""What ``planaria top`` draws, and where it looks."""

from __future__ import annotations

import io
import itertools
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from planaria.commands.failures import UsageError
from planaria.commands.onlook import look_at_folder
from planaria.commands.top import Ended, choose, notes, refuse_silent, top, watch
from planaria.observe.onlook import frame, memory_text, ranked, staff_text

NOW = 5000.0


def process(ident: str, life: str = "ready", rank: int | None = None) -> dict[str, Any]:
    kind = ident.rpartition("-")[0]
    return {"kind": kind, "ident": ident, "node": "abcdef0123", "life": life, "since_s": 65.0, "rank": rank}


def seen(**status: Any) -> dict[str, Any]:
    generations = [
        {"generation": 1, "layout": "dp4", "workers": 4, "spares": 0, "cause": "start"}
        | {"from_step": 0, "to_step": 40, "recovery_s": None, "phases": {}}
    ]
    known = {"state": "running", "step": 41, "total_steps": 100, "loss": 2.5, "generation": 1, "layout": "dp4"}
    known |= {"workers": 4, "ready": 4, "checkpoint_step": 25, "memory": {"a": 3 << 20}, "nodes": [], "goodput": {}}
    known |= {"bad_samples": 0, "last_event": "", "generations": generations, "tokens_per_s": 1e4, "step_s": 0.5}
    processes = [process("worker-2", rank=1), process("worker-0", rank=0), process("worker-9"), process("loader-0")]
    processes += [process("worker-3", "starting"), process("worker-1", "lost"), process("loader-1", "lost")]
    events = [(NOW - 9 + n, "joined", f"news {n} [bold]x[/bold]") for n in range(8)]
    return {
        "name": "tiny",
        "run_dir": "/runs/tiny",
        "began": NOW - 600,
        "status": known | status,
        "losses": [3.0, 2.75, 2.5],
        "events": events,
        "processes": processes,
    }


def drawn(view: dict[str, Any], width: int = 100, height: int | None = None, plain: bool = False) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False, color_system=None)
    console.print(frame(view, now=NOW, width=width - 1, height=height, plain=plain))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert plain is False or text.isascii()
    return text.splitlines()


def test_a_frame_shows_workers_loaders_and_news():
    text = "\n".join(drawn(seen()))
    assert "processes  workers 3 ready, 1 starting, 1 lost; loaders 1 ready, 1 lost" in text
    assert "memory  3 MiB on 1 nodes, at most 3 MiB on one" in text
    assert "10 min 00 s" in text and "news 7 [bold]x[/bold]" in text
    rows = [line.split()[:4] for line in text.splitlines() if "worker-" in line and "lost" not in line]
    assert rows == [
        ["0", "worker-0", "abcdef01", "training"],
        ["1", "worker-2", "abcdef01", "training"],
        ["-", "worker-9", "abcdef01", "spare"],
        ["-", "worker-3", "abcdef01", "starting"],
    ]


@pytest.mark.parametrize("width", [24, 40, 72, 200])
@pytest.mark.parametrize("plain", [False, True])
def test_a_frame_is_never_wider_than_the_terminal(width, plain):
    assert max(len(line) for line in drawn(seen(), width, plain=plain)) <= width


def test_a_narrow_frame_keeps_its_numbers():
    assert any("dp4" in line and "1–41" in line and "…" not in line for line in drawn(seen(), 40))  # noqa: RUF001


@pytest.mark.parametrize("height", [24, 40])
def test_a_frame_of_a_large_fleet_fits_the_terminal(height):
    view = seen()
    view["processes"] = [process(f"worker-{n}", rank=n) for n in range(500)]
    lines = drawn(view, 100, height)
    assert len(lines) <= max(height, 30) and any("more not shown" in line for line in lines)


def test_texts():
    assert staff_text([]) == "none" and memory_text({}) is None
    assert [row["ident"] for row in ranked(seen()["processes"])] == ["worker-0", "worker-2", "worker-9", "worker-3"]


def test_the_job_that_is_meant():
    jobs = [seen(), seen() | {"name": "big", "run_dir": "/runs/big"}]
    assert choose(jobs, "big") == choose(jobs, "/runs/big") == 1 and choose(jobs[:1], None) == 0
    for asked, given, message in [(None, jobs, "name one"), ("x", jobs, "no job 'x'"), (None, [], "no job runs")]:
        with pytest.raises(UsageError, match=message):
            choose(given, asked)


def test_an_address_where_nobody_listens_is_refused_at_once():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(UsageError, match="nobody answers there"):
            refuse_silent(address)
        free.listen()
        refuse_silent(address)
    refuse_silent(None)
    refuse_silent("auto")


def test_watching_ends_with_the_job_and_survives_a_controller_that_is_away():
    console = Console(file=io.StringIO(), width=90, height=40, force_terminal=True, highlight=False)
    looks = iter([None, seen(), None, seen(step=77), Ended()])

    def source() -> dict[str, Any] | None:
        found = next(looks)
        if isinstance(found, Ended):
            raise found
        return found

    watch(console, source, 0.0)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "no answer; trying again" in text and "41/100" in text
    assert "77/100" in text.rpartition("\x1b[?1049l")[2]  # the last frame, once the screen is back


def test_ctrl_c_gives_the_terminal_back():
    console = Console(file=io.StringIO(), width=90, height=40, force_terminal=True, highlight=False)
    counter = itertools.count()

    def source() -> dict[str, Any]:
        if next(counter) == 2:
            raise KeyboardInterrupt
        return seen()

    watch(console, source, 0.0)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.index("\x1b[?1049h") < text.index("\x1b[?1049l")  # the other screen, and back
    assert text.rindex("\x1b[?25l") < text.rindex("\x1b[?25h")  # the cursor is shown again


def event(kind: str, at: float, **fields: Any) -> dict[str, Any]:
    return {"time": at, "event": kind, "text": kind, **fields}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    events = [
        event("joined", 100.0, member="worker-0", node="n0"),
        event("joined", 100.0, member="worker-1", node="n1"),
        event("joined", 100.0, member="standby-0", node="n0"),
        event("joined", 100.0, member="loader-0", node="n0"),
        event("generation", 101.0, gen=1, layout="dp2", workers=["worker-1", "worker-0"], step=0, cause="start"),
        {"time": 102.0, "event": "state", "from": "forming", "to": "running"},
        event("promoted", 103.0, member="standby-0", node="n0"),
        event("lost", 104.0, member="worker-1"),
    ]
    metrics = [{"time": 103.0, "step": 0, "gen": 1, "loss": 2.0, "step_s": 0.5}]
    for name, rows in (("events", events), ("metrics", metrics)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_a_folder_tells_who_is_there(run_dir):
    view = look_at_folder(str(run_dir), 110.0)
    lives = {row["ident"]: (row["kind"], row["life"], row["rank"], row["since_s"]) for row in view["processes"]}
    assert lives == {
        "worker-0": ("worker", "ready", 1, 10.0),
        "worker-1": ("worker", "lost", None, 6.0),
        "standby-0": ("worker", "ready", None, 10.0),
        "loader-0": ("loader", "ready", None, 10.0),
    }
    assert view["status"]["step_s"] == 0.5 and view["losses"] == [2.0] and not view["status"]["final"]
    assert notes(view) == [] and "crashed" in notes(look_at_folder(str(run_dir), 500.0))[0]
    assert any("worker-0" in line for line in drawn(view))


def test_one_frame_of_a_folder(run_dir, capsys):
    assert top(str(run_dir), None, once=True, interval_s=1.0) == 0
    assert "workers 2 ready, 1 lost" in capsys.readouterr().out
    (run_dir / "empty").mkdir()
    with pytest.raises(UsageError, match="not a run directory"):
        top(str(run_dir / "empty"), None, once=False, interval_s=1.0)
