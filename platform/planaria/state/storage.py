"""Where checkpoints lie: the few operations that the vault needs, and the local folder that has them.

An object store has no rename; there the manifest, written last, is what makes a checkpoint visible,
and ``publish`` is where that difference goes.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

Buffer = bytes | bytearray | memoryview

_SMALL, _GATHERED = 1 << 16, 1 << 18


class Blob(Protocol):
    """An open file. Safe to read from several threads.

    Attributes:
        chunk: bytes to ask for at a time, where more are wanted.
    """

    chunk: int

    @property
    def path(self) -> str: ...
    @property
    def size(self) -> int: ...
    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill ``buffer`` from ``offset`` on; gives the bytes read, fewer only at the end of the file."""
        ...

    def close(self) -> None: ...


class Storage(Protocol):
    """A place with flat folders of files. All errors are ``OSError``."""

    def folders(self) -> dict[str, str]:
        """Name of every folder, with an identity that changes when the name is given to another one."""
        ...

    def open_files(self, folder: str) -> FileOpener:
        """Access to the files of ``folder``; keeps naming the same folder through renames."""
        ...

    def write(self, folder: str, name: str, chunks: Iterable[Buffer]) -> int:
        """Write a file durably, the folder made if absent; gives its size in bytes."""
        ...

    def publish(self, temp: str, final: str, aside: str) -> None:
        """Give ``temp`` the name ``final``, durably; a folder that has it is first renamed to ``aside``."""
        ...

    def remove(self, folder: str, via: str) -> None:
        """Remove ``folder``, renamed to ``via`` first so that nobody sees half of it. Absent is fine."""
        ...

    def path(self, folder: str = "", name: str = "") -> str: ...
    def free(self) -> int:
        """Free bytes."""
        ...


class FileOpener(Protocol):
    """Opens the files of one folder."""

    def open(self, name: str) -> Blob: ...
    def close(self) -> None: ...


class LocalBlob:
    """A local file, read by position.

    In chunks that the processor's cache holds, so that their checksum costs no second way through memory.
    """

    chunk = 1 << 18

    def __init__(self, path: str, handle: BinaryIO) -> None:
        self.path, self._handle = path, handle
        self.size = os.fstat(handle.fileno()).st_size

    def read_into(self, buffer: memoryview, offset: int) -> int:
        done = 0
        while done < len(buffer):  # one call moves at most 2 GiB
            count = os.preadv(self._handle.fileno(), [buffer[done:]], offset + done)
            if count == 0:
                break
            done += count
        return done

    def close(self) -> None:
        self._handle.close()


class LocalFiles:
    """Files of one local folder, held by descriptor so that a rename meanwhile mixes nothing."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)

    def open(self, name: str) -> LocalBlob:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._fd)
        try:
            handle = os.fdopen(fd, "rb", buffering=0)
        except OSError:  # a folder: fdopen refuses it and leaves the descriptor open
            os.close(fd)
            raise
        return LocalBlob(os.path.join(self._path, name), handle)

    def close(self) -> None:
        os.close(self._fd)


class LocalStorage:
    """Folders under one local (or shared, POSIX) directory."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def folders(self) -> dict[str, str]:
        try:
            with os.scandir(self.root) as entries:
                return {item.name: str(item.inode()) for item in entries if item.is_dir(follow_symlinks=False)}
        except FileNotFoundError:
            return {}

    def open_files(self, folder: str) -> LocalFiles:
        return LocalFiles(self.path(folder))

    def write(self, folder: str, name: str, chunks: Iterable[Buffer]) -> int:
        make_folder(self.root / folder)
        with open(self.path(folder, name), "wb", buffering=0) as out:
            size = sum(write_all(out.fileno(), chunk) for chunk in gathered(chunks))
            os.fsync(out.fileno())
        sync_folder(self.path(folder))
        return size

    def publish(self, temp: str, final: str, aside: str) -> None:
        replaced = True
        try:
            os.rename(self.path(final), self.path(aside))
        except FileNotFoundError:
            replaced = False
        try:
            os.rename(self.path(temp), self.path(final))
        except OSError:
            if replaced:
                os.rename(self.path(aside), self.path(final))
            raise
        sync_folder(self.path())

    def remove(self, folder: str, via: str) -> None:
        try:
            if folder != via:
                shutil.rmtree(self.path(via), ignore_errors=True)  # left by a removal that was interrupted
                os.rename(self.path(folder), self.path(via))
            shutil.rmtree(self.path(via))
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno == errno.ENOTEMPTY:  # a late writer added a file: the next clean-up takes it
                return
            raise

    def path(self, folder: str = "", name: str = "") -> str:
        return os.path.join(self.root, *filter(None, (folder, name)))

    def free(self) -> int:
        place = self.root
        while not place.exists() and place != place.parent:
            place = place.parent
        return shutil.disk_usage(place).free


def gathered(chunks: Iterable[Buffer]) -> Iterator[Buffer]:
    """The same bytes, with small neighbours joined; large chunks are handed on as they are, not copied."""
    small = bytearray()
    for chunk in chunks:
        if len(chunk) < _SMALL:
            small += chunk
        if small and (len(chunk) >= _SMALL or len(small) >= _GATHERED):
            yield small
            small = bytearray()
        if len(chunk) >= _SMALL:
            yield chunk
    yield small


def write_all(fd: int, data: Buffer) -> int:
    """Write all of ``data``, of which one system call takes at most 2 GiB; gives its size in bytes."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
    return len(data)


def make_folder(path: Path) -> None:
    """``mkdir -p``, durably."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync_folder(path.parent)


def sync_folder(path: str | Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
