"""Copies of remote and unpacked files on this node's disk, shared by its processes, the oldest dropped first.

A copy appears by being renamed, so whoever sees it sees it whole. While it is made, its maker holds a lock on the
unfinished file: other processes wait for it and make nothing twice, and what a dead process left is taken over.
A copy that is dropped while somebody reads it stays readable for that reader, as open files do.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from planaria.data.errors import DataError
from planaria.data.files import File, client, reaching, split_s3

Chunks = Callable[[File], Iterable[bytes | memoryview]]
"""How the contents of a copy are made."""

CHUNK_BYTES = 32 << 20
_UNFINISHED = ".part"


def default_folder() -> str:
    """Where the cache is if nothing is configured."""
    return os.path.join(tempfile.gettempdir(), f"planaria-cache-{os.getuid()}")


@dataclass(frozen=True)
class Cache:
    """A folder of copies.

    Attributes:
        folder: on a disk of this node; made when it is first needed.
        limit: most bytes of all copies together.
    """

    folder: str
    limit: int

    def open(self, file: File, kind: str = "copy", make: Chunks | None = None) -> BinaryIO:
        """The copy of ``file``, opened; made first if there is none. Safe in any number of threads and processes.

        Args:
            file: a change of its version gives another copy.
            kind: what the copy is, where there are several of one file.
            make: yields its contents; by default those of the file itself.

        Raises:
            DataError: a copy larger than the limit, or a temporary folder of somebody else.
            OSError: the file cannot be read now, or the copy not be written; another attempt may succeed.
        """
        name = hashlib.blake2b(f"{file.path}\n{file.version}\n{kind}".encode(), digest_size=16).hexdigest()
        path = Path(self.folder) / name
        while True:
            try:
                opened = open(path, "rb")  # noqa: SIM115 (the caller's)
            except FileNotFoundError:
                self._make(path, file, make or remote_chunks)
            else:
                os.utime(opened.fileno())  # used now: it goes last
                return opened

    def _make(self, path: Path, file: File, make: Chunks) -> None:
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        if self.folder == default_folder() and os.stat(self.folder).st_uid != os.getuid():
            # Anybody may have made it where all may write, and copies are believed.
            raise DataError(self.folder, "belongs to another user", "set data.cache_dir to a folder of your own")
        unfinished = path.with_suffix(_UNFINISHED)
        with open(unfinished, "ab") as out:
            fcntl.flock(out, fcntl.LOCK_EX)
            if not _same(unfinished, out) or path.exists():
                return  # another process has finished it meanwhile
            try:
                out.truncate(0)
                written = 0
                for chunk in make(file):
                    written += len(chunk)
                    if written > self.limit:
                        what = f"takes more than the {self.limit / 2**30:.1f} GiB of the cache"
                        raise DataError(file.path, what, "raise data.cache_gib, or write smaller shards")
                    out.write(chunk)
                out.flush()
                self._make_room(written)
                os.rename(unfinished, path)
            except BaseException:
                os.unlink(unfinished)  # still locked, so it is ours
                raise

    def _make_room(self, wanted: int) -> None:
        """Drop the copies that were used longest ago, until ``wanted`` more bytes fit."""
        found: list[tuple[float, int, Path]] = []
        for entry in os.scandir(self.folder):
            path = Path(entry.path)
            try:
                if entry.name.endswith(_UNFINISHED):
                    _drop_if_abandoned(path)
                else:
                    found.append((entry.stat().st_mtime, entry.stat().st_size, path))
            except FileNotFoundError:
                continue
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total + wanted <= self.limit:
                break
            path.unlink(missing_ok=True)
            total -= size


def _same(path: Path, opened: BinaryIO) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(opened.fileno()))
    except FileNotFoundError:
        return False


def _drop_if_abandoned(path: Path) -> None:
    with open(path, "rb") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        if _same(path, opened):
            path.unlink()


def remote_chunks(file: File) -> Iterable[memoryview]:
    """The bytes of a remote file, in order. Raises ``OSError``."""
    bucket, key = split_s3(file.path)
    buffer = memoryview(bytearray(min(CHUNK_BYTES, file.size)))
    done = 0
    while done < file.size:
        part = buffer[: min(CHUNK_BYTES, file.size - done)]
        with reaching():
            got = client(bucket).read_into(key, part, done)
        if got < len(part):
            raise OSError(f"{file.path} has changed: it ends at byte {done + got}, and had {file.size}")
        yield part
        done += got


class Handles:
    """Open files, the least recently used closed; each thread has the one it reads for itself.

    Args:
        opener: opens the file of a number; may raise ``OSError``.
        most: open files that are kept, besides the one that each reading thread has in use.
    """

    def __init__(self, opener: Callable[[int], BinaryIO], most: int) -> None:
        self._opener, self._most = opener, most
        self._lock = threading.Lock()
        self._open: dict[int, BinaryIO] = {}

    def __reduce__(self) -> tuple[type[Handles], tuple[Callable[[int], BinaryIO], int]]:
        return type(self), (self._opener, self._most)

    def read(self, number: int, offset: int, size: int) -> bytes:
        """``size`` bytes from ``offset`` on; fewer only where the file ends. Raises ``OSError``."""
        # A thread takes the handle out of the cache while it seeks and reads, so nobody else moves or closes it.
        with self._lock:
            file = self._open.pop(number, None)
        if file is None:
            file = self._opener(number)
        try:
            file.seek(offset)
            data = file.read(size)
        except BaseException:
            file.close()  # a handle that failed once, e.g. a stale NFS one, may never recover
            raise
        with self._lock:
            surplus = [self._open.pop(number, None)]  # another thread may have opened the file meanwhile
            self._open[number] = file
            while len(self._open) > self._most:
                surplus.append(self._open.pop(next(iter(self._open))))
        for other in surplus:
            if other is not None:
                other.close()
        return data

    def close(self) -> None:
        """Close the files; the next access opens them again."""
        with self._lock:
            for file in self._open.values():
                file.close()
            self._open.clear()
