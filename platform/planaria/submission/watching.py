"""A submission from its start to its end, through breaks in the connection to the head."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from planaria.submission.jobs import Jobs, unreachable

PATIENCE_S = 300.0
"""Longest time without an answer from the head; Kubernetes starts a lost head anew in less."""
PAUSE_S = 1.0
OVER = ("SUCCEEDED", "FAILED", "STOPPED")


class HeadLost(RuntimeError):
    """The head has not answered for too long; how the job fares is not known."""


class NoSuchJob(ValueError):
    """The head does not know this submission."""


@dataclass(frozen=True)
class End:
    """How a submission ended."""

    status: str
    code: int | None
    """Exit code of the driver; None where Ray knows none."""
    message: str


@dataclass
class Reader:
    """Passes on what of a job's log has not been passed on yet, as each connection begins at the log's start."""

    write: Callable[[str], None]
    passed: int = 0
    """Characters written."""
    at: int = 0
    """Characters that this connection has brought."""

    def begin(self) -> None:
        """A connection begins."""
        self.at = 0

    def take(self, text: str) -> None:
        """``text`` follows what this connection has brought so far."""
        known = min(len(text), max(0, self.passed - self.at))
        self.at += len(text)
        if known < len(text):
            self.write(text[known:])
            self.passed += len(text) - known


@dataclass
class Patience:
    """How long calls may fail in a row."""

    limit_s: float = PATIENCE_S
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _since: float | None = None

    def answered(self) -> None:
        """A call has come through."""
        self._since = None

    def failed(self, error: Exception) -> None:
        """A call has not; waits before the next one.

        Raises:
            HeadLost: for too long.
        """
        now = self.clock()
        self._since = now if self._since is None else self._since
        if now - self._since >= self.limit_s:
            raise HeadLost(
                f"the head has not answered for {self.limit_s:.0f} s ({str(error) or type(error).__name__}); the job "
                "may go on, and is found in the run directory or by ray job list"
            )
        self.sleep(PAUSE_S)


def info(jobs: Jobs, ident: str, patience: Patience) -> Any:
    """Ray's record of the submission.

    Raises:
        HeadLost: no answer for too long.
        NoSuchJob: the head does not know it.
    """
    while True:
        try:
            found = jobs.get_job_info(ident)
        except unreachable() as error:
            if is_unknown(error):
                raise NoSuchJob(f"{ident}: the cluster knows no such submission; ray job list shows them") from None
            patience.failed(error)
        else:
            patience.answered()
            return found


def status_of(details: Any) -> str:
    """Status in one word."""
    return str(details.status.value)


def is_unknown(error: Exception) -> bool:
    """Whether the head answered that there is no such job, as opposed to not answering."""
    return "does not exist" in str(error) or "status code 404" in str(error)


def watch(jobs: Jobs, ident: str, write: Callable[[str], None] | None, patience: Patience) -> End:
    """Wait for the end of a submission; ``write`` gets its log as it grows.

    Raises:
        HeadLost, NoSuchJob.
    """
    reader = Reader(write) if write is not None else None
    while True:
        details = info(jobs, ident, patience)
        status = status_of(details)
        if status in OVER:
            break
        if reader is not None and status == "RUNNING":
            try:
                asyncio.run(_tail(jobs, ident, reader, patience))
            except unreachable() as error:
                patience.failed(error)
                continue
        patience.sleep(PAUSE_S)
    if reader is not None:
        # The connection may have broken before the last lines, which say why the job ended.
        reader.begin()
        reader.take(last_log(jobs, ident))
    return End(status, details.driver_exit_code, details.message or "")


def last_log(jobs: Jobs, ident: str) -> str:
    """The log of a submission that is over; empty if it cannot be had, since how it ended is known without it."""
    try:
        return jobs.get_job_logs(ident)
    except unreachable():
        return ""


async def _tail(jobs: Jobs, ident: str, reader: Reader, patience: Patience) -> None:
    reader.begin()
    async for text in jobs.tail_job_logs(ident):
        patience.answered()
        reader.take(text)
