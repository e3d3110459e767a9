"""Submissions against a head that answers, refuses, loses answers and is lost itself."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.job_submission import JobStatus

import planaria
from planaria.commands import submit as command
from planaria.commands.failures import UsageError
from planaria.config import ConfigError
from planaria.submission.jobs import use_token
from planaria.submission.order import STOP_WAIT, make_order, pack, parse_variables
from planaria.submission.stopping import stop_and_wait
from planaria.submission.watching import HeadLost, NoSuchJob, Patience, Reader, info, watch

JOB = "name: first\nmodel: {preset: llava-tiny}\ntrain: {steps: 9, global_batch: 8}\nstorage: ${PLACE}\n"


@dataclass
class Head:
    """A head node that does as told: ``states`` are its answers one after the other, the last for ever."""

    states: list[Any] = field(default_factory=list)
    logs: list[Any] = field(default_factory=list)
    """What each connection to the log brings: pieces, or an error in its midst."""
    log: str = ""
    code: int | None = None
    refusals: list[Exception] = field(default_factory=list)
    submitted: list[dict[str, Any]] = field(default_factory=list)
    stops: int = 0
    folder: list[str] = field(default_factory=list)

    def submit_job(self, **what: Any) -> str:
        self.submitted.append(what)
        self.folder = sorted(path.name for path in Path(what["runtime_env"]["working_dir"]).iterdir())
        if self.refusals:
            raise self.refusals.pop(0)
        return str(what["submission_id"])

    def get_job_info(self, job_id: str) -> Any:
        answer = self.states[0] if len(self.states) == 1 else self.states.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(status=JobStatus(answer), driver_exit_code=self.code, message="Job said why")

    def get_job_logs(self, job_id: str) -> str:
        return self.log

    async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        for piece in self.logs.pop(0) if self.logs else []:
            if isinstance(piece, Exception):
                raise piece
            yield piece

    def stop_job(self, job_id: str) -> bool:
        self.stops += 1
        return True


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def patience(self, limit_s: float = 30.0) -> Patience:
        return Patience(limit_s, lambda: self.now, self.sleep)


GONE = ConnectionError("connection refused")
UNKNOWN = RuntimeError("Request failed with status code 404: Job x does not exist.")


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.setenv("PLACE", "/shared/runs")
    file = tmp_path / "job.yaml"
    file.write_text(JOB)

    def run(head: Head, *overrides: str, **options: Any) -> int:
        clock = Clock()
        monkeypatch.setattr(command, "reach", lambda _address: head)
        monkeypatch.setattr(command, "Patience", lambda limit_s=30.0: clock.patience(limit_s))
        return command.submit(str(file), overrides, None, **options)

    return run


def test_what_is_sent(submit, tmp_path, capsys):
    (tmp_path / "secrets.txt").write_text("lies beside the job file")
    head = Head(["SUCCEEDED"])
    assert submit(head, "optim.lr=3e-4", variables=["NOTE=a b"], wait=False) == 0
    (sent,) = head.submitted
    words = shlex.split(sent["entrypoint"])
    assert words == ["python", "-m", "planaria", "train", "job.yaml", "--set", "optim.lr=3e-4"]
    assert head.folder == ["job.yaml", "planaria"]
    assert sent["runtime_env"].keys() == {"working_dir", "env_vars"}, "anything else may need a network"
    variables = sent["runtime_env"]["env_vars"]
    assert variables == {"PLACE": "/shared/runs", "NOTE": "a b", STOP_WAIT: variables[STOP_WAIT]}
    assert sent["metadata"]["run_dir"] == "/shared/runs/first"
    assert all(isinstance(value, str) for value in sent["metadata"].values()), "Ray takes text only"
    assert not Path(sent["runtime_env"]["working_dir"]).exists()
    assert sent["submission_id"] in capsys.readouterr().out


def test_a_job_gets_longer_to_end_than_its_driver_waits_for_the_last_checkpoint():
    from planaria.trainer import STOP_LIMIT_S

    order = make_order("", [], {}, {}, name="first")
    assert float(order.variables[STOP_WAIT]) > STOP_LIMIT_S


def test_overrides_reach_the_shell_as_they_are():
    nasty = "name=it's; rm -rf $HOME"
    order = make_order("", [nasty], {}, {}, name="first")
    assert shlex.split(order.entrypoint)[-1] == nasty


def test_only_variables_that_the_job_file_mentions_go_along():
    environment = {"DATA": "/d", "AWS_SECRET_ACCESS_KEY": "secret", "EMPTY": ""}
    order = make_order("data: ${DATA:-x} ${EMPTY:-y} ${UNSET}", ["a=${DATA}"], environment, {}, name="first")
    assert order.variables.keys() == {STOP_WAIT, "DATA"}


def test_the_package_is_small_and_whole(tmp_path):
    (tmp_path / "job.yaml").write_text(JOB)
    folder = tmp_path / "sent"
    folder.mkdir()
    size = pack(Path(planaria.__file__).parent, tmp_path / "job.yaml", folder)
    assert (folder / "planaria" / "py.typed").is_file()
    assert not list(folder.rglob("__pycache__"))
    assert size < 5_000_000


def test_a_wrong_job_file_is_told_before_anything_is_sent(submit):
    head = Head(["SUCCEEDED"])
    with pytest.raises(ConfigError, match=r"train\.steps"):
        submit(head, "train.steps=none")
    with pytest.raises(ConfigError, match="storage: 'runs' is relative"):
        submit(head, "storage=runs")
    with pytest.raises(UsageError, match="--env 1X=2: expected NAME=VALUE"):
        submit(head, variables=["1X=2"])
    assert not head.submitted


def test_variables_for_the_job_count_in_its_check(submit, monkeypatch):
    monkeypatch.delenv("PLACE")
    head = Head(["SUCCEEDED"])
    with pytest.raises(ConfigError, match="PLACE is not set"):
        submit(head)
    assert submit(head, variables=["PLACE=/other"]) == 0
    assert submit(head, check=False) == 0, "its variables may be the cluster's"
    first, second = head.submitted
    assert first["runtime_env"]["env_vars"]["PLACE"] == "/other"
    assert "PLACE" not in second["runtime_env"]["env_vars"]
    assert second["submission_id"].startswith("first-")


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [("SUCCEEDED", 0, 0), ("FAILED", 2, 2), ("FAILED", None, 1), ("FAILED", -9, 137), ("STOPPED", None, 143)],
)
def test_the_exit_code_is_the_jobs_own(submit, status, code, expected):
    assert submit(Head(["PENDING", "RUNNING", status], code=code)) == expected


def test_a_failure_tells_why(submit, capsys):
    log = "planaria: train.steps: wrong\n"
    submit(Head(["FAILED"], code=2, log=log))
    shown = capsys.readouterr()
    assert log in shown.out
    assert "exit code 2" in shown.err and "Job said why" not in shown.err
    submit(Head(["FAILED"], code=2, log=log), follow=False)
    shown = capsys.readouterr()
    assert log not in shown.out
    assert "Job said why" in shown.err
    submit(Head(["FAILED"], code=None))
    assert "Job said why" in capsys.readouterr().err, "a driver that never ran has no log"


def test_a_head_that_is_not_ready_is_asked_again(submit):
    busy = RuntimeError("Request failed with status code 500: No available agent to submit job")
    head = Head([GONE, "SUCCEEDED"], refusals=[busy])
    assert submit(head) == 0
    assert len(head.submitted) == 2
    assert len({one["submission_id"] for one in head.submitted}) == 1


def test_a_submission_whose_answer_was_lost_is_not_made_twice(submit):
    head = Head(["RUNNING", "SUCCEEDED"], refusals=[ConnectionResetError("reset")])
    assert submit(head) == 0
    assert len(head.submitted) == 1


def test_a_refusal_is_final(submit):
    head = Head([UNKNOWN], refusals=[RuntimeError("Request failed with status code 400: no such runtime_env field")])
    with pytest.raises(UsageError, match=r"refuses the job: .*no such runtime_env field"):
        submit(head)
    head = Head([UNKNOWN], refusals=[GONE] * 1000)
    with pytest.raises(UsageError, match="takes no jobs"):
        submit(head)


def test_the_log_is_whole_and_nothing_twice_through_breaks_of_the_connection():
    whole = "one\ntwo\nthree\nfour\n"
    pieces: list[list[Any]] = [["one\n", "tw", GONE], ["one\ntwo\n", "thr", GONE], []]
    head = Head(["PENDING", GONE, "RUNNING", "RUNNING", "RUNNING", "SUCCEEDED"], logs=pieces, log=whole)
    written: list[str] = []
    assert watch(head, "x", written.append, Clock().patience()).status == "SUCCEEDED"
    assert "".join(written) == whole


def test_a_reader_passes_on_each_character_once():
    written: list[str] = []
    reader = Reader(written.append)
    for pieces in (["ab"], ["a", "b", "c"], ["abcde"], ["ab"], ["abcde", "f"]):
        reader.begin()
        for piece in pieces:
            reader.take(piece)
    assert "".join(written) == "abcdef"


def test_a_lost_head_ends_the_wait_but_a_short_absence_does_not():
    clock = Clock()
    assert watch(Head([*[GONE] * 25, "SUCCEEDED"]), "x", None, clock.patience()).status == "SUCCEEDED"
    with pytest.raises(HeadLost, match="not answered for 30 s"):
        watch(Head([GONE]), "x", None, clock.patience())
    with pytest.raises(NoSuchJob, match="knows no such submission"):
        info(Head([UNKNOWN]), "x", clock.patience())


def test_ctrl_c_ends_the_watching_only(submit, capsys):
    head = Head(["RUNNING"])
    head.tail_job_logs = _interrupted  # type: ignore[method-assign]
    assert submit(head) == 130
    assert head.stops == 0
    assert "goes on" in capsys.readouterr().err


async def _interrupted(_job_id: str) -> AsyncIterator[str]:
    raise KeyboardInterrupt
    yield ""


def test_a_stop_is_asked_again_of_a_job_that_had_not_started():
    head = Head(["PENDING", "PENDING", "RUNNING", "RUNNING", "RUNNING", "STOPPED"])
    assert stop_and_wait(head, "x", 100, Clock().patience()) == "STOPPED"
    assert head.stops == 3, "twice in vain, once heard"


def test_a_stop_has_a_limit_and_leaves_ended_jobs_alone():
    assert stop_and_wait(Head(["RUNNING"]), "x", 5, Clock().patience()) is None
    over = Head(["FAILED"])
    assert stop_and_wait(over, "x", 5, Clock().patience()) == "FAILED"
    assert over.stops == 0


def test_stop_shows_where_the_job_goes_on(monkeypatch, capsys):
    lines = [f"step {number}" for number in range(100)] + ["planaria: goes on from the checkpoint of step 99"]
    head = Head(["RUNNING", "STOPPED"], log="\n".join(lines))
    monkeypatch.setattr(command, "reach", lambda _address: head)
    monkeypatch.setattr(command, "Patience", lambda limit_s: Clock().patience(limit_s))
    assert command.stop("x", None, 60) == 0
    shown = capsys.readouterr().out
    assert "checkpoint of step 99" in shown and "step 50" not in shown


def test_a_token_that_is_at_hand_is_shown(tmp_path):
    home = {"HOME": str(tmp_path)}
    for given in ({}, {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "x"}):
        environment = home | given
        use_token(environment)
        assert environment == home | given
    assert _mode(home | {"RAY_AUTH_TOKEN": "x"}) == "token"
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("x")
    assert _mode(dict(home)) == "token"
    assert _mode(home | {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "missing")}) is None


def _mode(environment: dict[str, str]) -> str | None:
    use_token(environment)
    return environment.get("RAY_AUTH_MODE")


def test_variables():
    assert parse_variables(["A=1", "B=x=y", "C="]) == {"A": "1", "B": "x=y", "C": ""}
