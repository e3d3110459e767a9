"""Checkpoints in a local (or shared, POSIX) folder."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from planaria.state.local_write import write_chunks
from planaria.state.manifest import NAME
from planaria.state.storage import Buffer


class LocalBlob:
    """A local file, read by position.

    In chunks that the processor's cache holds, so that their checksum costs no second way through memory.
    """

    chunk = 1 << 19

    def __init__(self, path: str, handle: BinaryIO) -> None:
        self.path, self._handle = path, handle
        self.size = os.fstat(handle.fileno()).st_size

    def read_into(self, buffer: memoryview, offset: int) -> int:
        done = os.preadv(self._handle.fileno(), [buffer], offset)
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

    def folders(self, leftovers: bool = False) -> dict[str, str]:
        try:
            with os.scandir(self.root) as entries:
                return {item.name: str(item.inode()) for item in entries if item.is_dir(follow_symlinks=False)}
        except FileNotFoundError:
            return {}

    def open_files(self, folder: str) -> LocalFiles:
        return LocalFiles(self.path(folder))

    def shard_file(self, writer_id: int, token: str) -> str:
        return f"shard-{writer_id:05d}.safetensors"  # the folder is the attempt's own

    def write(self, folder: str, name: str, chunks: Iterable[Buffer]) -> int:
        make_folder(self.root / folder)
        with open(self.path(folder, name), "wb", buffering=0) as out:
            size = write_chunks(out.fileno(), chunks)
            os.fsync(out.fileno())
        sync_folder(self.path(folder))
        return size

    def publish(self, temp: str, final: str, aside: str, manifest: bytes) -> None:
        self.write(temp, NAME, [manifest])
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

    def names(self, folder: str) -> list[str]:
        try:
            with os.scandir(self.path(folder)) as entries:
                return [item.name for item in entries if item.is_file(follow_symlinks=False)]
        except FileNotFoundError:
            return []

    def create(self, folder: str, name: str, data: bytes) -> bool:
        make_folder(self.root / folder)
        try:
            fd = os.open(self.path(folder, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(fd, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        sync_folder(self.path(folder))
        return True

    def fetch(self, folder: str, name: str) -> bytes:
        return Path(self.path(folder, name)).read_bytes()

    def discard(self, folder: str, name: str) -> None:
        Path(self.path(folder, name)).unlink(missing_ok=True)

    def path(self, folder: str = "", name: str = "") -> str:
        return os.path.join(self.root, *filter(None, (folder, name)))

    def free(self) -> int:
        place = self.root
        while not place.exists() and place != place.parent:
            place = place.parent
        return shutil.disk_usage(place).free


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
