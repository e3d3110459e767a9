"""The live view: what is drawn on a terminal, what is written elsewhere, and that nothing breaks it."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from planaria.observe import text
from planaria.observe.goodput import CLASSES
from planaria.observe.view import (
    LiveView,
    encodable,
    generation_table,
    goodput_table,
    print_summary,
    status_panel,
    summary_lines,
)


def row(number: int = 1, **changed: Any) -> dict[str, Any]:
    usual = {
        "generation": number,
        "layout": "dp_shard4",
        "workers": 4,
        "spares": 0,
        "cause": "start",
        "from_step": 0,
        "to_step": 150,
        "recovery_s": None,
        "phases": {},
    }
    return usual | changed


def status(**changed: Any) -> dict[str, Any]:
    usual = {
        "state": "running",
        "step": 150,
        "total_steps": 400,
        "loss": 0.28312,
        "tokens_per_s": 18_234.0,
        "step_s": 0.25,
        "generation": 1,
        "layout": "dp_shard4",
        "workers": 4,
        "ready": 4,
        "checkpoint_step": 100,
        "bad_samples": 0,
        "last_event": "checkpoint of step 100 is durable",
        "generations": [row(to_step=1)],
        "final": False,
    }
    return usual | changed


def summary(**changed: Any) -> dict[str, Any]:
    lost = row(2, layout="dp_shard3", workers=3, cause="lost worker-2", from_step=150, to_step=400, recovery_s=0.84)
    usual = {
        "state": "finished",
        "error": None,
        "steps": 400,
        "loss": 0.05,
        "seconds": 125.0,
        "generations": [row(), lost],
        "evaluation": {"samples": 256, "exact_match": 0.8, "questions": 256, "accuracy": 0.8, "chance": 0.2},
        "checkpoint_step": 400,
        "bad_samples": 0,
        "run_dir": "/runs/demo",
    }
    return usual | changed


def account(**changed: float) -> dict[str, float]:
    """The account of a job of 100 s or so."""
    account = dict.fromkeys(CLASSES, 0.0) | {"productive": 90.0, "startup": 6.0, "data_wait": 0.5, "other": 0.01}
    account |= {"recovery_abort": 1.0, "recovery_form": 0.25, "recovery_first_step": 1.5, "under_way": 0.1} | changed
    wall = sum(account.values())
    return account | {"wall": wall, "goodput": account["productive"] / wall}


class Terminal(io.StringIO):
    """A stream with an encoding that is a terminal if it says so."""

    def __init__(self, tty: bool = False, encoding: str = "utf-8") -> None:
        super().__init__()
        self._tty, self._encoding = tty, encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def isatty(self) -> bool:
        return self._tty


def drawn(renderable: Any, width: int = 100, encoding: str = "utf-8") -> str:
    stream = Terminal(encoding=encoding)
    Console(file=stream, width=width, highlight=False).print(renderable)
    return stream.getvalue()


# Text


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=200), st.integers(0, 60), st.booleans())
def test_sparkline_fits(values, width, plain):
    line = text.sparkline([value / 1e10 for value in values], width, plain=plain)
    assert len(line) <= width
    assert set(line) <= set(text.ASCII_BLOCKS if plain else text.BLOCKS)


def test_sparkline_shows_a_fall():
    assert text.sparkline([8, 7, 6, 5, 4, 3, 2, 1], 8) == text.BLOCKS[::-1]
    assert text.sparkline([1, 1, 1], 8) == text.BLOCKS[0] * 3
    assert text.sparkline([], 8) == text.sparkline([math.nan], 8) == ""


@given(st.integers(-5, 1000), st.integers(0, 500), st.integers(0, 80))
def test_bar_keeps_its_width(done, total, width):
    assert len(text.bar(done, total, width)) == width


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "-"),
        (0.838, "0.84 s"),
        (12.34, "12.3 s"),
        (59.97, "1 min 00 s"),
        (245, "4 min 05 s"),
        (7620, "2 h 07 min"),
    ],
)
def test_duration(seconds, shown):
    assert text.duration(seconds) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "-"), (0, "0"), (940.2, "940"), (999.9, "1.00k"), (18_234, "18.2k"), (182_340, "182k"), (1.25e6, "1.25M")],
)
def test_quantity(value, shown):
    assert text.quantity(value) == shown


def test_generation_cells():
    rows = [row(), row(2, cause="resize", from_step=150, to_step=150, spares=1, recovery_s=0.5)]
    first, second = text.generation_cells(rows, plain=True)
    assert first == ("1", "dp_shard4", "4", "start", "1-150", "-")
    assert second == ("2", "dp_shard4", "4 +1", "workers joined", "none", "0.50 s")


def test_the_last_generation_is_brought_up_to_date():
    rows = text.live_rows(status())
    assert rows[-1]["to_step"] == 150


def test_goodput_names_the_largest_losses_first():
    assert text.goodput_text(account()) == "90.6%; most lost to start-up 6.00 s, recovery 2.75 s, data wait 0.50 s"
    idle = dict.fromkeys(account(), 0.0)
    assert text.goodput_text(None) is text.goodput_text({}) is text.goodput_text(idle) is None
    assert text.goodput_text(idle | {"startup": 2.0, "wall": 2.0}) == "0.0%; most lost to start-up 2.00 s"
    assert text.goodput_text(account(under_way=50.0)).startswith("60.3%; most lost to start-up")
    assert text.goodput_text(idle | {"productive": 2.0, "wall": 2.0, "goodput": 1.0}) == "100.0%"


def test_the_goodput_rows_are_the_whole_account():
    known = account(lost=3.0, resize=2.0, waiting=7.0, evaluation=4.0, checkpoint=0.3)
    rows = text.goodput_rows(known)
    assert sum(seconds for _, seconds, _ in rows) == pytest.approx(known["wall"])
    assert [name for name, _, _ in rows][:4] == ["productive steps", "too few workers", "start-up", "evaluation"]
    assert {name: phases for name, _, phases in rows}["recovery"] == {"abort": 1.0, "form": 0.25, "first_step": 1.5}


def test_goodput_is_shown_where_it_is_known():
    shown = status(goodput=account())
    assert "goodput 90.6%" in text.progress_line(shown)
    assert "goodput" not in text.progress_line(status(goodput={}))
    panel = drawn(status_panel("demo", shown, [1.0], elapsed_s=1.0, width=100))
    assert "90.6%; most lost to start-up 6.00 s" in panel
    assert "goodput" not in drawn(status_panel("demo", status(), [1.0], elapsed_s=1.0, width=100))
    assert ("goodput", text.goodput_text(account())) in summary_lines(summary(goodput=account()))


def test_nodes_that_were_left_alone_are_in_the_summary():
    row = {"node": "abcdef123", "quarantined": True, "seconds_left": 30.0, "times": 2, "reason": "it hangs"}
    shown = dict(summary_lines(summary(nodes=[row, row | {"times": 0, "quarantined": False}])))
    assert shown["quarantined"] == f"abcdef12 (2x, {text.duration(30.0)} left: it hangs)"
    assert "quarantined" not in dict(summary_lines(summary()))


@pytest.mark.parametrize("plain", [False, True])
def test_goodput_table(plain):
    encoding = "ascii" if plain else "utf-8"
    page = drawn(goodput_table(account(), plain=plain), width=70, encoding=encoding)
    cells = [" ".join(line.replace("|", " ").split()) for line in page.encode(encoding).decode(encoding).splitlines()]
    assert cells[2] == "productive steps 1 min 30 s 90.6%"
    assert cells[4:6] == ["recovery 2.75 s 2.8% abort 1.00 s, form 0.25 s,", "first step 1.50 s"]
    assert cells[-1] == "all 1 min 39 s 100%"


def test_progress_line():
    line = text.progress_line(status(bad_samples=3))
    for part in ("step 150/400", "loss 0.2831", "18.2k tok/s", "gen 1 dp_shard4", "workers 4/4", "bad samples 3"):
        assert part in line


def test_score():
    assert text.score_text(summary()["evaluation"]) == ("80.0% of 256 questions answered right; chance is 20.0% (4.0x)")
    captions = {"samples": 10, "exact_match": 0.5, "questions": 0, "accuracy": 0.0, "chance": 0.0}
    assert text.score_text(captions) == "50.0% of 10 references reproduced in full"
    assert text.score_text(None) is None


# The panel


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 200])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_panel_fits_its_terminal(width, encoding):
    generations = [row(n, cause=f"lost worker-{n}, worker-{n + 1}", recovery_s=0.5 * n) for n in range(1, 10)]
    view = status(generation=9, generations=generations, last_event="something happened " * 20)
    panel = status_panel("job", view, [3.0, 2.0, 1.0], elapsed_s=61.0, width=width, plain=encoding == "ascii")
    lines = drawn(panel, width, encoding).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) < 26
    "\n".join(lines).encode(encoding)


def test_panel_shows_what_matters():
    panel = drawn(status_panel("emoji", status(), [3.0, 2.0, 1.0], elapsed_s=61.0, width=100))
    for part in (
        "emoji",
        "running",
        "150/400",
        "0.2831",
        "18.2k tok/s",
        "dp_shard4",
        "generation 1",
        "4 active",
        "step 100",
        "is durable",
        "1\u2013150",
    ):
        assert part in panel


def test_panel_before_the_first_step():
    early = status(state="waiting", step=0, loss=None, generation=0, layout="", step_s=0.0, checkpoint_step=None)
    panel = drawn(status_panel("job", early | {"generations": [], "last_event": ""}, [], elapsed_s=0.1, width=80))
    assert "waiting" in panel
    assert "none yet" in panel


def test_names_are_no_markup():
    panel = drawn(status_panel("a[red]b", status(last_event="[bold]x[/]"), [], elapsed_s=1, width=100))
    assert "a[red]b" in panel
    assert "[bold]x[/]" in panel


def test_narrow_table_drops_columns():
    assert "workers" not in drawn(generation_table([row()], width=60), 60)
    assert "workers" in drawn(generation_table([row()], width=100))


# Plain lines


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def logged(statuses: list[tuple[float, dict[str, Any]]], encoding: str = "utf-8") -> list[str]:
    stream, clock = Terminal(encoding=encoding), Clock()
    with LiveView("job", Console(file=stream, highlight=False), interval_s=5, clock=clock) as view:
        for now, seen in statuses:
            clock.now = now
            view(seen)
    return stream.getvalue().splitlines()


def test_plain_lines_come_every_few_seconds():
    lines = logged([(at / 4, status(step=at)) for at in range(81)])
    assert len(lines) == 5  # 0, 5, 10, 15, 20 s


def test_an_event_is_written_at_once_but_not_more_than_one_a_second():
    lines = logged([(at / 4, status(last_event=f"event {at}")) for at in range(41)])
    assert len(lines) == 11
    assert all("step 150/400" in line and "| event" in line for line in lines)
    assert logged([(0, status()), (1.1, status(last_event="new"))])[1].endswith("| new")


def test_the_final_status_is_always_written_once():
    assert len(logged([(0, status()), (0.1, status(final=True, state="finished"))])) == 2
    over = status(state="finished")
    assert len(logged([(0, over), (0.1, over | {"final": True})])) == 1


def test_plain_lines_are_whole_and_encodable():
    (line,) = logged([(0, status(last_event="Umlaut ü, " + "long " * 60))], encoding="ascii")
    assert len(line) > 300
    line.encode("ascii")
    assert encodable("ü", "ascii") == "?"


def test_a_terminal_gets_a_panel_that_goes_away(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal(tty=True)
    console = Console(file=stream, width=100, height=40, force_terminal=True, highlight=False)
    with LiveView("job", console) as view:
        view(status())
        view(status(step=151))
    shown = stream.getvalue()
    assert "151/400" in shown
    assert "\x1b[2K" in shown  # erased at the end


def test_no_colour_when_asked(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal(tty=True)
    console = Console(file=stream, width=100, force_terminal=True, highlight=False)
    console.print(status_panel("job", status(), [1.0], elapsed_s=1, width=100))
    assert "\x1b[3" not in stream.getvalue()


def test_a_dumb_terminal_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal(tty=True)
    with LiveView("job", Console(file=stream, width=80, force_terminal=True, highlight=False)) as view:
        assert not view.animated
        view(status())
    assert "step 150/400" in stream.getvalue()
    assert "\x1b[2K" not in stream.getvalue()


# The summary


def test_summary():
    stream = Terminal()
    print_summary(Console(file=stream, width=100, highlight=False), "demo", summary())
    shown = stream.getvalue()
    for part in ("dp_shard3", "lost worker-2", "0.84 s", "finished", "4.0x", "2 min 05 s", "step 400", "/runs/demo"):
        assert part in shown


def test_summary_of_a_failure():
    failed = summary(
        state="failed", error="no worker left", loss=None, evaluation=None, checkpoint_step=None, generations=[]
    )
    lines = dict(summary_lines(failed))
    assert lines["outcome"] == "failed"
    assert lines["reason"] == "no worker left"
    assert lines["checkpoint"] == "none"
    assert "held out" not in lines
