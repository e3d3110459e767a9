"""Where checkpoints lie: the few operations that the vault needs, of a local folder and of an object store alike.

A local folder becomes a checkpoint by being renamed. An object store has no rename: there the shards lie at their
final place from the start, under names that no other attempt uses, and the manifest, put last, is what makes them
a checkpoint. :meth:`Storage.publish` is where that difference goes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

Buffer = bytes | bytearray | memoryview


class Blob(Protocol):
    """An open file. Safe to read from several threads."""

    @property
    def path(self) -> str: ...
    @property
    def size(self) -> int: ...
    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill ``buffer`` from ``offset`` on; gives the bytes read, fewer only at the end of the file."""
        ...

    def close(self) -> None: ...


class FileOpener(Protocol):
    """Opens the files of one folder."""

    def open(self, name: str) -> Blob: ...
    def close(self) -> None: ...


class Storage(Protocol):
    """A place with flat folders of files.

    All errors are ``OSError``, or ``StorageUnavailable`` where the place as a whole cannot be used. Safe to use
    from several threads, and after a fork.
    """

    def folders(self, leftovers: bool = False) -> dict[str, str]:
        """Name of every folder, with an identity that changes when the name is given to another one.

        Args:
            leftovers: attempts, too, for which an object store has to look harder.
        """
        ...

    def open_files(self, folder: str) -> FileOpener:
        """Access to the files of ``folder``; keeps naming the same folder through renames."""
        ...

    def shard_file(self, writer_id: int, token: str) -> str:
        """Name for the shard that ``writer_id`` writes in the attempt ``token``."""
        ...

    def write(self, folder: str, name: str, chunks: Iterable[Buffer]) -> int:
        """Write a file durably, the folder made if absent; gives its size in bytes."""
        ...

    def publish(self, temp: str, final: str, aside: str, manifest: bytes) -> None:
        """Make ``temp`` with this manifest visible as ``final``, durably; one that is there stays as ``aside``."""
        ...

    def remove(self, folder: str, via: str) -> None:
        """Remove ``folder`` so that nobody sees half of it (locally: renamed to ``via`` first). Absent is fine."""
        ...

    def names(self, folder: str) -> list[str]:
        """Names of the plain files in ``folder``; none if it is absent."""
        ...

    def create(self, folder: str, name: str, data: bytes) -> bool:
        """Write a small file durably unless the name is taken; says whether it was free."""
        ...

    def fetch(self, folder: str, name: str) -> bytes:
        """Contents of a small file."""
        ...

    def discard(self, folder: str, name: str) -> None:
        """Remove a small file. Absent is fine."""
        ...

    def path(self, folder: str = "", name: str = "") -> str: ...
    def free(self) -> int | None:
        """Free bytes; ``None`` where that is not known."""
        ...


def is_url(root: str | Path) -> bool:
    """Whether ``root`` names an object store rather than a local folder."""
    return isinstance(root, str) and "://" in root


def below(root: str | Path, name: str) -> str:
    """``root/name``, for folders and URLs."""
    if not is_url(root):
        return os.path.join(root, name)
    scheme, _, rest = str(root).partition("://")
    return f"{scheme}://{rest.rstrip('/')}/{name}"


def storage_at(root: str | Path) -> Storage:
    """The storage of a local folder or an ``s3://bucket/prefix`` URL.

    Raises:
        ValueError: a URL of another scheme, or without a bucket.
    """
    if is_url(root):
        from planaria.state.object_storage import ObjectStorage  # s3fs takes a while to import

        return ObjectStorage(str(root))
    from planaria.state.local_storage import LocalStorage

    return LocalStorage(root)
