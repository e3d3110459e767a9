"""Names of the folders that a vault keeps. Pure.

``step-00000042``               a checkpoint
``step-00000042.tmp-<token>``   one being written; not visible
``step-00000042.old-<token>``   one being replaced by the same step; counts while it is there
``step-00000042.gone-<token>``  one being removed; not visible
Anything else is not ours and is left alone. In a local folder these are folders; what they are in an object store
is told in :mod:`planaria.state.object_names`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_FOLDER = re.compile(r"step-(\d{8,})(?:\.(tmp|old|gone)-([A-Za-z0-9][A-Za-z0-9_-]*))?")
_TOKEN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True, slots=True)
class FolderName:
    """A parsed name; ``kind`` is empty for a checkpoint."""

    step: int
    kind: str = ""
    token: str = ""

    def __post_init__(self) -> None:
        if self.step < 0:
            raise ValueError(f"step {self.step} must not be negative")
        if self.kind and not _TOKEN.fullmatch(self.token):
            raise ValueError(f"token {self.token!r} must be letters, digits, - and _, at most 64")

    @property
    def visible(self) -> bool:
        """Whether readers count it as a checkpoint."""
        return self.kind in ("", "old")

    def __str__(self) -> str:
        return f"step-{self.step:08d}" + (f".{self.kind}-{self.token}" if self.kind else "")

    @classmethod
    def parse(cls, name: str) -> FolderName | None:
        """Inverse of ``str``; ``None`` for a foreign name."""
        match = _FOLDER.fullmatch(name)
        if not match:
            return None
        try:
            parsed = cls(int(match[1]), match[2] or "", match[3] or "")
        except ValueError:
            return None
        return parsed if str(parsed) == name else None


def newest_first(names: list[FolderName]) -> list[FolderName]:
    """Visible checkpoints in the order in which a reader tries them: the replaced one after its successor."""
    return sorted((name for name in names if name.visible), key=lambda name: (-name.step, name.kind, name.token))
