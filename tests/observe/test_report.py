"""The report over folders as runs leave them: whole, torn, failed, empty, still growing, very long."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.support.forms import long_form

from planaria.commands.failures import UsageError
from planaria.commands.report import report
from planaria.observe.report.history import read_history
from planaria.observe.report.page import page

NOW = 2_000_000.0
VOID = {"meta", "link", "line", "rect", "circle", "polyline", "br", "img"}


class Checked(HTMLParser):
    """Well-formed, one id each, and nothing that would be fetched."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if "id" in given:
            self.ids.append(str(given["id"]))
        self.links += [str(given[name]) for name in ("href", "src") if name in given]
        assert tag != "script"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [str(value) for name, value in attrs if name == "id"]

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)


def checked(folder: Path, now: float = NOW) -> str:
    """The words of the report, once it is known to be sound."""
    text = page(read_history(folder, now))
    found = Checked(text)
    assert len(found.ids) == len(set(found.ids))
    assert all(link.startswith(("#", "data:")) for link in found.links)
    assert {link[1:] for link in found.links if link.startswith("#")} <= set(found.ids)
    assert "url(" not in text and "@import" not in text
    return " ".join(" ".join(found.words).split())


def write(folder: Path, **files: Any) -> Path:
    for name, rows in files.items():
        if isinstance(rows, list):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            (folder / f"{name}.json").write_text(json.dumps(rows))
    return folder


def event(kind: str, at: float, text: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"time": NOW + at, "event": kind, **({"text": text or kind} if kind != "state" else {}), **fields}


def step(number: int, at: float, gen: int = 1, **fields: Any) -> dict[str, Any]:
    known = {"loss": 5.0 / (1 + number), "step_s": 0.4, "data_wait_s": 0.01, "snapshot_s": 0.02, "compute_s": 0.3}
    return {"time": NOW + at, "step": number, "gen": gen, "skipped": False, **known, **fields}


def generation(number: int, at: float, step: int, cause: str, workers: int, **fields: Any) -> dict[str, Any]:
    names = [f"worker-{n}" for n in range(workers)]
    known = {"layout": f"dp_shard{workers}", "workers": names, "spares": [], "source": "memory"}
    return event("generation", at, gen=number, step=step, cause=cause, **(known | fields))


JOB = {"name": "tiny <b>", "train": {"steps": 20, "global_batch": 8}, "elastic": {"max_workers": 3}}


def a_run(folder: Path) -> Path:
    phases = {"abort": 0.1, "plan": 0.01, "form": 0.04, "build": 0.2, "restore": 0.05, "first_step": 0.35}
    events = [
        event("joined", 0, "worker-0 is ready"),
        generation(1, 2, 0, "start", 3, source="start", planned=True),
        event("state", 3, to="running", **{"from": "forming"}),
        event("checkpoint", 6, "checkpoint of step 5 is durable", step=5, took_s=0.2),
        event("lost", 7, "worker-2 lost: <script>alert(1)</script>", member="worker-2"),
        generation(2, 7.2, 10, "lost worker-2", 2, planned=False, detect_s=1.25),
        event("recovered", 7.75, gen=2, seconds=0.75, phases=phases),
        event("bad_sample", 8, key="a.tar/1", cause="the caption is not UTF-8 (byte 0xbd at 0)"),
        event("bad_sample", 8, key="a.tar/2", cause="the caption is not UTF-8 (byte 0xfe at 7)"),
        event("state", 12, to="finished", **{"from": "running"}),
        event("finished", 12, "all 20 steps done"),
    ]
    metrics = [step(n, 3 + n * 0.4) for n in range(10)] + [step(n, 8 + n * 0.2, gen=2) for n in range(10, 20)]
    metrics.insert(10, step(10, 7, loss=99.0))  # will be done again
    return write(folder, events=events, metrics=metrics, job=JOB, environment={"torch": "2.13", "host": {"cpus": 2}})


def test_a_run_with_a_fault(tmp_path: Path) -> None:
    words = checked(a_run(tmp_path), NOW + 13)
    assert "20 of 20 (100%)" in words and "160 8 per step" in words
    assert "1 step had to be done again" in words and "99" not in words.split("Events")[0].split("Layout over time")[0]
    # 1.25 s until somebody noticed, 0.75 s from there on.
    assert "1 recovery from a fault: median 2.00 s, longest 2.00 s, together 2.00 s." in words
    assert "detect no sign of life any more, and nobody had noticed yet 1.25 s" in words
    assert "11 to 20" in words and "lost worker-2" in words
    assert "the caption is not UTF-8 (byte N at N) 2" in words
    assert "torch 2.13 host.cpus 2" in words
    text = page(read_history(tmp_path, NOW + 13))
    assert "<script" not in text and "tiny &lt;b&gt;" in text


def test_what_is_torn_or_missing_is_named(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    (folder / "metrics.jsonl").unlink()
    (folder / "job.json").write_text('{"name": "cut o')
    with (folder / "events.jsonl").open("a") as file:
        file.write('[1]\n{"event": "checkpoint"}\n{"time": 1, "eve')
    words = checked(folder)
    assert "metrics.jsonl is missing" in words and "events.jsonl: 2 torn or foreign lines left out" in words
    assert "job.json cannot be read" in words and "No step was completed." in words


@pytest.mark.parametrize("files", [{}, {"events": []}, {"events": [], "metrics": []}, {"summary": {"state": "x"}}])
def test_an_empty_folder(tmp_path: Path, files: dict[str, Any]) -> None:
    assert "The folder holds no record of a run." in checked(write(tmp_path, **files))


@pytest.mark.parametrize("junk", [{"train": 3, "elastic": [1]}, {"train": {"steps": "x", "global_batch": 0}}])
def test_foreign_files(tmp_path: Path, junk: dict[str, Any]) -> None:
    folder = a_run(tmp_path)
    summary = {"state": "finished", "evaluation": {"odd": 1}, "goodput": {"wall": "long"}}
    write(folder, job=junk, summary=summary, goodput=[{"wall": 1}], ranks=[{"ranks": 3}], journal=[{"t": "run"}, {}])
    assert "finished" in checked(folder)


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    events = [event("state", 1, to="failed", **{"from": "waiting"}), event("failed", 1, "1 of at least 2 workers")]
    assert "failed 1 of at least 2 workers" in checked(write(tmp_path, events=events))


@pytest.mark.parametrize("later, says", [(5.0, "The run goes on"), (600.0, "it has crashed or hangs")])
def test_a_run_that_is_not_over(tmp_path: Path, later: float, says: str) -> None:
    events = [generation(1, 2, 0, "start", 3), event("state", 3, to="running")]
    words = checked(write(tmp_path, events=events, metrics=[step(0, 4)], job=JOB), NOW + 4 + later)
    assert says in words and "1 of 20 (5%)" in words


def test_two_hundred_recoveries(tmp_path: Path) -> None:
    events = [generation(1, 0, 0, "start", 3)]
    for number in range(2, 202):
        events.append(generation(number, number * 10, number, f"lost worker-{number}", 2 + number % 2, planned=False))
        seconds = 1.0 + number / 100
        events.append(event("recovered", number * 10 + 2, gen=number, seconds=seconds, phases={"form": 0.5}))
    metrics = [step(n, n * 10 + 3, gen=n) for n in range(2, 202)]
    words = checked(write(tmp_path, events=events, metrics=metrics))
    assert "200 recoveries from faults" in words and "The 24 longest of 200 are drawn" in words
    assert "lost worker-2 1.02 s 0.50 s 0.52 s" in words


def test_losses_that_are_no_numbers(tmp_path: Path) -> None:
    metrics = [step(0, 1), step(1, 2, loss=None, skipped=True), step(2, 3), step(3, 4, loss=None, step_s=None)]
    words = checked(write(tmp_path, events=[generation(1, 0, 0, "start", 1)], metrics=metrics))
    assert "The loss of 2 steps was no number" in words and "1 step changed nothing" in words
    checked(write(tmp_path, metrics=[step(0, 1, loss=None, step_s=None, data_wait_s=None, snapshot_s=None)]))


def test_what_every_rank_did(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    rows = [
        {"time": NOW + 5, "gen": 1, "seconds": 9, "ranks": {"0": [5, 5, 1.0, 0.1, 0]}},
        {"time": NOW + 9, "gen": 2, "seconds": 9, "ranks": {"0": [5, 5, 1.0, 0.1, 20], "1": [5, 1, 0.6, 0.1, 20]}},
        {"time": NOW + 9, "gen": 2, "seconds": 9, "ranks": {"0": [5, 5, 1.0, 0.1, 20], "1": [5, 1, 1.0, 0.1, 20]}},
    ]
    words = checked(write(folder, ranks=rows))
    assert "the slowest is rank 1, with 0.80 s per step" in words and "1 10 0.80 s 0.02 s 40 5" in words


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = a_run(tmp_path)
    assert report(str(folder), None) == 0
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>")
    capsys.readouterr()
    assert report(str(folder), "-") == 0
    assert capsys.readouterr().out.startswith("<!DOCTYPE html>")
    with pytest.raises(UsageError, match="no such folder"):
        report(str(folder / "nowhere"), None)
    (folder / "void").mkdir()
    with pytest.raises(UsageError, match="not a run directory"):
        report(str(folder / "void"), None)
    with pytest.raises(UsageError, match="cannot be written"):
        report(str(folder), str(folder / "void" / "deep" / "x.html"))


@long_form
def test_a_million_steps(tmp_path: Path) -> None:
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for number in range(1_000_000):
            loss = 77.0 if number == 543_210 else 1.0 + number % 7
            file.write(json.dumps(step(number, number * 0.4, loss=loss)) + "\n")
    write(tmp_path, events=[generation(1, 0, 0, "start", 3)], job=JOB)
    began = time.monotonic()
    text = page(read_history(tmp_path, NOW))
    assert len(text) < 1 << 20 and time.monotonic() - began < 120
    assert "between 1 and 77" in text


@long_form
def test_in_a_browser(tmp_path: Path) -> None:
    """No errors, no request, nothing wider than a phone, nothing that keeps anybody out."""
    if not shutil.which("node") or not shutil.which("chromium"):
        pytest.skip("needs node and chromium")
    script = Path(__file__).with_name("look_at_report.cjs")
    probe = "require('playwright-core'); require('axe-core')"
    if subprocess.run(["node", "-e", probe], capture_output=True, env=os.environ).returncode:
        pytest.skip("needs npm's playwright-core and axe-core on NODE_PATH")
    folder = a_run(tmp_path)
    assert report(str(folder), None) == 0
    seen = subprocess.run(["node", script, folder / "report.html"], capture_output=True, text=True, timeout=240)
    assert seen.returncode == 0, seen.stderr
    assert json.loads(seen.stdout) == []
