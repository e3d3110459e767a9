"""The vault: durable checkpoints of one run, newest intact first.

A checkpoint becomes visible in one instant (locally by the rename of its folder, in an object store when its manifest
is put), and only when complete. To replace a step that exists (redone after a rollback), the old one is first put
aside, under a name that readers still count, then the new one takes its place: at every instant a reader finds one
of the two.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from planaria.state import claims
from planaria.state.checkpoint import Checkpoint
from planaria.state.claims import Claim
from planaria.state.errors import CheckpointError, StorageUnavailable
from planaria.state.names import FolderName, newest_first
from planaria.state.retention import removable
from planaria.state.storage import Storage, below, storage_at
from planaria.state.writer import CheckpointWriter

log = logging.getLogger(__name__)

_ATTEMPTS = 100


@dataclass(frozen=True)
class CheckpointInfo:
    """One visible checkpoint; ``intact`` is ``None`` where it was not looked at."""

    step: int
    path: str
    intact: bool | None
    problem: str | None = None
    identity: str = ""
    """Differs from that of a checkpoint of the same step that this one replaced."""


class Vault:
    """Checkpoints under ``<root>/checkpoints``.

    Args:
        root: folder of the run, seen by all nodes; or ``s3://bucket/prefix``, with endpoint and keys taken from the
            environment (``AWS_ENDPOINT_URL``, ``AWS_PROFILE``, ``AWS_ACCESS_KEY_ID``, ...).
        keep_last: intact checkpoints that a commit leaves; older ones are removed.
        keep_every: checkpoints whose step is a multiple of it are never removed; ``None``: no such.
        verify_before_removal: read the kept checkpoints back, each once, before anything older is
            removed. Costs one read per checkpoint; without it a shallow check has to do.
        on_problem: told of every damaged checkpoint that is skipped; default: a logged warning.
        claim: right to commit that another process of the same controller took; see :meth:`claim`.
        storage: where ``checkpoints`` is, in place of what ``root`` names.

    Attributes:
        path: folder or URL of the checkpoints.
    """

    def __init__(
        self,
        root: str | Path,
        keep_last: int = 2,
        verify_before_removal: bool = True,
        on_problem: Callable[[str], None] | None = None,
        keep_every: int | None = None,
        claim: Claim | None = None,
        storage: Storage | None = None,
    ) -> None:
        if keep_last < 1 or (keep_every is not None and keep_every < 1):
            raise ValueError(f"keep_last={keep_last} and keep_every={keep_every} must be at least 1")
        self._storage = storage or storage_at(below(root, "checkpoints"))
        self.path = self._storage.path()
        self._keep_last, self._keep_every, self._deep_removal = keep_last, keep_every, verify_before_removal
        self._claim = claim
        self._report = on_problem or (lambda problem: log.warning("checkpoint skipped: %s", problem))
        self._verified: set[tuple[str, str]] = set()

    def writer(self, step: int, token: str) -> CheckpointWriter:
        """A writer for ``step``. All ranks give the same token; another attempt gives another one."""
        return CheckpointWriter(self._storage, step, token, self._after_commit, self._fence)

    def claim(self, holder: str) -> Claim:
        """Become the only process that may commit and delete, until another claims the vault.

        Without a claim, and without one given to it, a vault commits unfenced.

        Args:
            holder: who this is, for the message that the next holder's predecessor gets.

        Returns:
            Plain data that other processes of the same controller may give to their own ``Vault``.

        Raises:
            CheckpointError: the place cannot be written.
        """
        self._claim = claims.take(self._storage, holder, self._report)
        return self._claim

    def _fence(self) -> None:
        if self._claim is not None:
            claims.check(self._storage, self._claim)

    def list(self, check: Literal["names", "shallow", "deep"] = "shallow") -> Sequence[CheckpointInfo]:
        """All visible checkpoints, newest first."""
        for _ in range(_ATTEMPTS):
            visible = self._visible()
            found = [self._info(*at, check) for at in visible]
            damaged = [at for at, info in zip(visible, found, strict=True) if info.intact is False]
            if not any(self._moved(*at) for at in damaged):
                return found
        raise self._restless()

    def latest_intact(self, deep: bool = False) -> Checkpoint | None:
        """The newest checkpoint that passes the check, opened; ``None`` if there is none.

        Args:
            deep: verify every slice, too. Without it each slice is verified when it is read.
        """
        problems: dict[str, None] = {}
        for _ in range(_ATTEMPTS):
            moved = False
            for name, identity in self._visible():
                try:
                    checkpoint = self._open(name, deep)
                except StorageUnavailable:
                    raise  # says nothing about this checkpoint
                except CheckpointError as error:
                    if moved := self._moved(name, identity):
                        break  # replaced or removed under our eyes, so there is a newer one: look again
                    if str(error) not in problems:
                        problems[str(error)] = None
                        self._report(str(error))
                else:
                    return checkpoint
            if not moved:
                return None
        raise self._restless()

    def at(self, step: int) -> Checkpoint:
        """The checkpoint of ``step``, opened after a shallow check.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        for name, _ in self._visible():
            if name.step == step:
                return self._open(name, deep=False)
        raise CheckpointError(f"{self._storage.path()}: holds no checkpoint of step {step}")

    def _info(self, name: FolderName, identity: str, check: Literal["names", "shallow", "deep"]) -> CheckpointInfo:
        path = self._storage.path(str(name))
        if check == "names":
            return CheckpointInfo(name.step, path, None, identity=identity)
        try:
            self._open(name, check == "deep").close()
        except StorageUnavailable:
            raise
        except CheckpointError as error:
            return CheckpointInfo(name.step, path, False, str(error), identity)
        return CheckpointInfo(name.step, path, True, identity=identity)

    def _restless(self) -> CheckpointError:
        return CheckpointError(f"{self._storage.path()}: kept changing during {_ATTEMPTS} looks at it")

    def _visible(self) -> Sequence[tuple[FolderName, str]]:
        try:
            folders = self._storage.folders()
        except OSError as error:
            raise CheckpointError(f"{self._storage.path()}: cannot be listed: {error.strerror}") from error
        names = [name for name in map(FolderName.parse, folders) if name]
        return [(name, folders[str(name)]) for name in newest_first(names)]

    def _moved(self, name: FolderName, identity: str) -> bool:
        return (name, identity) not in self._visible()

    def _open(self, name: FolderName, deep: bool) -> Checkpoint:
        checkpoint = Checkpoint.open(self._storage, str(name))
        try:
            problems = checkpoint.verify() if deep else []
        except BaseException:
            checkpoint.close()
            raise
        if checkpoint.step != name.step:
            problems.append(f"{checkpoint.path}: holds step {checkpoint.step}; the folder was renamed")
        if problems:
            checkpoint.close()
            raise CheckpointError("; ".join(problems))
        return checkpoint

    def _after_commit(self, final: FolderName, token: str) -> None:
        """Retention. The new checkpoint is durable by now, so trouble here is reported, not raised."""
        try:
            folders = self._storage.folders(leftovers=True)
            self._verified = {(name, ino) for name, ino in self._verified if name != str(final)}
            names = [name for name in map(FolderName.parse, folders) if name]
            sound = lambda name: self._sound(name, folders[str(name)])  # noqa: E731
            for name in removable(names, self._keep_last, token, sound, self._keep_every, upto=final.step):
                self._fence()
                via = name if name.kind in ("tmp", "gone") else FolderName(name.step, "gone", token)
                self._storage.remove(str(name), via=str(via))
        except (OSError, StorageUnavailable) as error:
            self._report(f"{self._storage.path()}: clean-up after step {final.step} failed: {error}")

    def _sound(self, name: FolderName, identity: str) -> bool:
        known = (str(name), identity) in self._verified
        if known and not self._deep_removal:
            return True  # looked at before, under this name and identity
        try:
            self._open(name, deep=self._deep_removal and not known).close()
        except StorageUnavailable:
            raise
        except CheckpointError as error:
            self._report(str(error))
            return False
        self._verified.add((str(name), identity))
        return True
