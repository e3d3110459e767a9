"""Writing a local file at the rate of the disk."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator

from planaria.state.storage import Buffer

_SMALL, _GATHERED, _AHEAD = 1 << 16, 1 << 18, 1 << 23


def write_chunks(fd: int, chunks: Iterable[Buffer]) -> int:
    """Write ``chunks`` one after the other from the start of a file; gives their size in bytes.

    The disk begins at once, while the next chunks are being made, not at the ``fsync`` that has to follow.
    """
    done = started = 0
    for chunk in _gathered(chunks):
        rest = memoryview(chunk)
        while rest:  # a call may take less than it is given
            count = os.write(fd, rest[:_AHEAD])
            done, rest = done + count, rest[count:]
            if done - started >= _AHEAD:
                _start(fd, started, done - started)
                started = done
    return done


def _gathered(chunks: Iterable[Buffer]) -> Iterator[Buffer]:
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


def _starter() -> Callable[[int, int, int], None]:
    """A hint to the system to begin writing a range of a file out; its failure means nothing."""
    try:
        call = ctypes.CDLL(None).sync_file_range  # Linux only
    except (OSError, AttributeError):
        return lambda fd, start, size: None
    call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)

    def start(fd: int, at: int, size: int) -> None:
        call(fd, at, size, 2)  # SYNC_FILE_RANGE_WRITE

    return start


_start = _starter()
