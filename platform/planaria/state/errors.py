"""What can go wrong with durable state."""

from __future__ import annotations


class CheckpointError(Exception):
    """A checkpoint that cannot be written or read; the message names the path and the remedy."""


class CheckpointDamaged(CheckpointError):
    """Bytes on disk that are not the bytes that were written.

    Attributes:
        file: path of the damaged file.
        slice: the slice that is affected, or ``None`` where the whole file is.
        reason: what is wrong with it.
    """

    def __init__(self, file: str, slice: str | None, reason: str) -> None:
        self.file, self.slice, self.reason = file, slice, reason
        super().__init__(f"{file}: {f'slice {slice}: ' if slice else ''}{reason}")

    def __reduce__(self) -> tuple[type[CheckpointDamaged], tuple[str, str | None, str]]:
        return type(self), (self.file, self.slice, self.reason)  # survives the way back from a Ray worker


class StorageUnavailable(CheckpointError):
    """The place of the checkpoints as a whole cannot be used: unreachable, wrong keys, no such bucket, clock skew.

    It says nothing about any checkpoint in it, so nothing is counted as damaged because of it.
    """


class Fenced(CheckpointError):
    """Another process has claimed the vault since; this one may neither commit nor delete any more."""
