"""The one error of the data package that stops a run."""

from __future__ import annotations


class DataError(ValueError):
    """Data that no sample-level policy can mend: says where, what is wrong, and what to do about it."""

    def __init__(self, where: str, what: str, remedy: str) -> None:
        # All three go to the base class, so that the error survives pickling between processes.
        super().__init__(where, what, remedy)
        self.where = where
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.remedy}"


class DataUnreachable(ConnectionError):
    """The place of the data cannot be used now, after all tries. Says nothing about the data, so nothing is damaged."""


class DataUnavailable(RuntimeError):
    """No loader has answered in time: unlike :class:`DataError`, another attempt may mend it."""
