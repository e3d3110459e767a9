"""Shared memory that leaves no name behind: files that have none, reached through the process that holds them.

The keeper makes them; a worker of the same node maps them through ``/proc/<keeper>/fd``. When the last process
that holds or maps one is gone, however it went, the kernel takes the memory back.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import struct
import tempfile
from dataclasses import dataclass

import xxhash

HEADER_BYTES = 4096
"""Before the data; a page, so that the data is aligned to one."""
_MAGIC = b"PLNRSNP1"
_HEADER = struct.Struct("<8sQQQ16s")


class MemoryTooSmall(Exception):
    """The shared memory of a node cannot hold what it must; the message gives both sizes and the remedy."""


class SharedBuffer:
    """A nameless file of ``nbytes`` in ``folder``, allocated in full and mapped.

    Raises:
        MemoryTooSmall: the folder's file system has not that much space.
        OSError: it cannot hold files at all.
    """

    def __init__(self, folder: str, nbytes: int) -> None:
        self.nbytes = nbytes
        self._fd = nameless(folder)
        try:
            # Without this a full tmpfs would end the process that touches the page (SIGBUS), not this call.
            os.posix_fallocate(self._fd, 0, nbytes)
            self.map = mmap.mmap(self._fd, nbytes)
        except OSError as error:
            os.close(self._fd)
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise too_small(folder, nbytes, free_bytes(folder)) from error
            raise

    @property
    def path(self) -> str:
        """Where other processes of this node and user can open it while this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @property
    def data(self) -> memoryview:
        """The bytes behind the header."""
        return memoryview(self.map)[HEADER_BYTES:]

    def release(self) -> None:
        """Give the memory of the data back; the header stays, and the data reads as zeros from now on."""
        with contextlib.suppress(OSError):  # not every file system can
            self.map.madvise(mmap.MADV_REMOVE, HEADER_BYTES, self.nbytes - HEADER_BYTES)
            self.nbytes = HEADER_BYTES

    def close(self) -> None:
        """Give it up here; the memory is free once nobody maps it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        try:
            self.map.close()
        except BufferError:
            return  # a view is still in use, e.g. being sent: the map goes with it


def nameless(folder: str) -> int:
    """Descriptor of a new file in ``folder`` that has no name."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    fd, path = tempfile.mkstemp(prefix="planaria-", dir=folder)
    os.unlink(path)
    return fd


def map_buffer(path: str, *, writable: bool) -> mmap.mmap:
    """Map a buffer that another process of this node made."""
    fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, 0, access=mmap.ACCESS_DEFAULT if writable else mmap.ACCESS_READ)
    finally:
        os.close(fd)


def free_bytes(folder: str) -> int:
    """Bytes that can still be allocated in ``folder``."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def too_small(folder: str, needed: int, free: int) -> MemoryTooSmall:
    """The error for ``needed`` bytes where only ``free`` are."""
    return MemoryTooSmall(
        f"{folder}: {needed:,} bytes are needed for snapshots of the training state, {free:,} are free. Give the "
        "node more shared memory (Docker: --shm-size; Kubernetes: an emptyDir with medium: Memory at /dev/shm), set "
        "memory.folder to a fast local disk, or memory.replicas=0 to keep no copies for other nodes"
    )


@dataclass(frozen=True, slots=True)
class Seal:
    """Header of a complete snapshot: which state it is."""

    generation: int
    step: int


def write_seal(memory: mmap.mmap, seal: Seal) -> None:
    """Make a snapshot valid: the last thing that is written."""
    raw = _HEADER.pack(_MAGIC, seal.generation, seal.step, 0, b"")
    memory[: len(raw) + 8] = raw + xxhash.xxh3_64_digest(raw)


def break_seal(memory: mmap.mmap) -> None:
    """Make a snapshot invalid: the first thing that is written."""
    memory[: _HEADER.size + 8] = bytes(_HEADER.size + 8)


def read_seal(memory: mmap.mmap) -> Seal | None:
    """The state that a buffer holds; None while it is being written, for good if its writer died then."""
    raw = memory[: _HEADER.size]
    if memory[_HEADER.size : _HEADER.size + 8] != xxhash.xxh3_64_digest(raw):
        return None
    magic, generation, step, _, _ = _HEADER.unpack(raw)
    return Seal(generation, step) if magic == _MAGIC else None
