"""The end of a job that cannot go on."""

from __future__ import annotations


class JobFailed(Exception):
    """The job cannot go on; the message is the diagnosis that its user reads."""

    def __init__(self, reason: str, trace: str | None = None) -> None:
        super().__init__(reason)
        self.trace = trace
        """Traceback of the worker whose error was the cause, if there was one."""
