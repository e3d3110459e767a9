"""One run of one contender: a process of its own, a time limit, and nothing left behind."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil

import _report as report
import planaria
from _measure import NoRecovery, Step, measure
from _peers.work import Work
from planaria.observe.record import read_lines

MARK = "PLANARIA_BENCH_RUN"
PR_SET_CHILD_SUBREAPER = 36  # of <linux/prctl.h>
CONTENDERS = {
    # name: (module under _peers, with its defaults?)
    "planaria": ("planaria_job", False),
    "torchrun": ("torchrun", False),
    "ray-train": ("ray_train", False),
    "torchrun-defaults": ("torchrun", True),
    "ray-train-defaults": ("ray_train", True),
}


def run(contender: str, work: Work, limit_s: float, *, brief: bool = False, log: Path | None = None) -> dict[str, Any]:
    """One row of the report: the figures, or ``absent`` with the reason.

    ``brief``: end the run as soon as it has caught up, instead of seeing the job through.
    """
    module, stock = CONTENDERS[contender]
    row: dict[str, Any] = {"contender": contender, "load": load()}
    enough = (lambda work: caught_up(module, work)) if brief else None
    output = log / f"{contender}.txt" if log else None
    with carried_out(module, replace(work, stock=stock), limit_s, enough, output) as (work, ending):
        try:
            row |= figures(module, work)
        except (NoRecovery, FileNotFoundError) as error:
            why = "the fault was never injected" if isinstance(error, FileNotFoundError) else str(error)
            return row | {"absent": f"{why}; {ending or 'exit code 0'}"}
        return row if ending is None else row | {"note": ending}


def load() -> float:
    """What other programs ask of the machine: the mean number of processes that ran or waited, over a minute."""
    return round(os.getloadavg()[0], 1)


@contextlib.contextmanager
def carried_out(
    module: str, work: Work, limit_s: float, enough: Callable[[Work], bool] | None, log: Path | None
) -> Iterator[tuple[Work, str | None]]:
    """``work`` in its scratch folder, done by ``_peers.MODULE`` in a process of its own, and how that ended: None if
    well. The run is ended as soon as ``enough(work)``; its output is kept in ``log``."""
    with scratch() as (folder, environment):
        work = replace(work, folder=str(folder))
        output = folder / "output.txt"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "_peers", module, work.as_json()],
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            code = wait(process, limit_s, (lambda: enough(work)) if enough else None)
        if log is not None:
            shutil.copy(output, log)
        if code == 0:
            yield work, None
        elif code is None:
            yield work, f"not finished within {limit_s:.0f} s"
        else:
            yield work, f"exit code {code}: {last_words(output)}"


def wait(process: subprocess.Popen[bytes], limit_s: float, enough: Callable[[], bool] | None) -> int | None:
    """The exit code; 0 also once ``enough()``; None when the time is up."""
    deadline = time.monotonic() + limit_s
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(1.0, left))
        if enough is not None and enough():
            return 0
    return None


def caught_up(module: str, work: Work) -> bool:
    """Whether the logs show all that is to be measured."""
    try:
        return figures(module, work)["caught_up_seconds"] is not None
    except (NoRecovery, OSError, ValueError):
        return False


def figures(module: str, work: Work) -> dict[str, Any]:
    """What the logs of a run say."""
    fault = json.loads((work.path / "fault.json").read_text(encoding="utf-8"))
    found = {"workers": fault["victim"]["world"], "processes_killed": fault["processes"]}
    if module != "planaria_job":
        rows = read_lines(work.path / "steps.jsonl")
        return found | asdict(measure([Step(r["step"], r["time"], r["inc"]) for r in rows], fault["time"]))
    from _peers.planaria_job import run_dir

    rows = read_lines(run_dir(work) / "metrics.jsonl")
    found |= asdict(measure([Step(r["step"] + 1, r["time"], str(r["gen"])) for r in rows], fault["time"]))
    for event in read_lines(run_dir(work) / "events.jsonl"):
        if event["event"] == "recovered" and event["time"] > fault["time"]:
            # The controller's clock starts with the first evidence; what lies before is detection.
            detect = max(0.0, found["recovery_seconds"] - event["seconds"])
            return found | {"phases": {"detect": detect} | event["phases"]}
    return found


def last_words(output: Path) -> str:
    """The last line of an error, without paths of this machine."""
    lines = [line.strip() for line in output.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit|Failed|Stopped)\b", line)]
    words = (errors or lines or ["no output"])[-1]
    return re.sub(r"(/[\w.+-]+){2,}", "PATH", words)[:200]


@contextlib.contextmanager
def scratch() -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder, and an environment that keeps temporary files in it and marks every process; both end here."""
    # Ray's socket paths must stay short, whatever TMPDIR says.
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir="/tmp"))
    mark = secrets.token_hex(8)
    adopt_orphans()
    before = set(psutil.Process().children(recursive=True))
    roots = [str(Path(__file__).resolve().parent), str(Path(planaria.__file__).resolve().parents[1])]
    roots += filter(None, [os.environ.get("PYTHONPATH")])  # where peers may lie
    environment = os.environ | {
        MARK: mark,
        "PYTHONPATH": os.pathsep.join(roots),
        "TMPDIR": str(folder),
        "RAY_TMPDIR": str(folder),
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    try:
        yield folder, environment
    finally:
        end_started(mark, before)
        shutil.rmtree(folder, ignore_errors=True)


def adopt_orphans() -> None:
    """Become the parent of processes whose own parent dies (Linux), so that none can slip away."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_started(mark: str, before: set[psutil.Process]) -> None:
    """SIGKILL what this run started and still lives: by descent, and by its mark where descent was lost."""
    for _ in range(5):
        left = [process for process in psutil.Process().children(recursive=True) if process not in before]
        left += [process for process in psutil.process_iter() if process not in left and is_marked(process.pid, mark)]
        if not left:
            return
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=5)


def is_marked(pid: int, mark: str) -> bool:
    """Whether the environment of ``pid`` holds the mark. Read raw: a process that renames itself, as Ray's do,
    overwrites the beginning, and parsers stop there."""
    try:
        return f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def settings(contender: str) -> dict[str, Any]:
    """How a contender is set up, for a reader."""
    module, stock = CONTENDERS[contender]
    found: dict[str, Any] = importlib.import_module(f"_peers.{module}").settings(stock)
    return found


def setting_table(work: Mapping[str, Any], contenders: list[str]) -> report.Table:
    """What all have in common, then each contender's own settings."""
    trees = {"all": work} | {name: settings(name) for name in contenders}
    lines = [[name, key, str(value)] for name, tree in trees.items() for key, value in tree.items()]
    return report.Table("Settings", ("contender", "setting", "value"), lines)
