"""Opening files of a data set wherever they lie: on a disk, in an object store, compressed."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar, cast

import pyarrow as pa

from planaria.data.cache import CHUNK_BYTES, Cache
from planaria.data.errors import DataError, DataUnreachable
from planaria.data.files import File, client, reaching, split_s3


def _zstd(file: BinaryIO) -> BinaryIO:
    return cast(BinaryIO, pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd"))


_OPENERS: Mapping[str, Callable[[BinaryIO], BinaryIO]] = {
    ".gz": lambda file: cast(BinaryIO, gzip.GzipFile(fileobj=file)),
    ".tgz": lambda file: cast(BinaryIO, gzip.GzipFile(fileobj=file)),
    ".bz2": lambda file: cast(BinaryIO, bz2.BZ2File(file)),
    ".xz": lambda file: cast(BinaryIO, lzma.LZMAFile(file)),  # noqa: SIM115 (closed by its user)
    ".zst": _zstd,
    ".zstd": _zstd,
}
COMPRESSED = tuple(_OPENERS)
"""Ends of names of files that are unpacked into the cache."""

_PIECE = 4 << 20
TOGETHER = 8
"""Remote files that are looked at together."""

T = TypeVar("T")


@dataclass(frozen=True)
class Reader:
    """Opens files; can be pickled.

    Attributes:
        cache: where remote files are copied to and compressed ones unpacked.
    """

    cache: Cache

    def open(self, file: File) -> BinaryIO:
        """The contents of ``file``, unpacked, with random access.

        Raises:
            DataError: damaged compression, or larger than the cache.
            OSError: it cannot be read now.
        """
        if file.path.lower().endswith(COMPRESSED):
            return self.cache.open(file, "unpacked", self._unpacked)
        return self.raw(file)

    def raw(self, file: File) -> BinaryIO:
        """The contents of ``file`` as they are. Raises as :meth:`open`."""
        return self.cache.open(file) if file.remote else open(file.path, "rb")

    def derived(self, file: File, kind: str, make: Callable[[BinaryIO], Iterable[bytes]]) -> BinaryIO:
        """What ``make`` yields, given the unpacked contents; kept in the cache under ``kind``.

        Raises as :meth:`open`.
        """

        def chunks(file: File) -> Iterator[bytes]:
            with self.open(file) as opened:
                yield from make(opened)

        return self.cache.open(file, kind, chunks)

    def text(self, file: File) -> bytes:
        """All of a small file. Raises as :meth:`open`."""
        with self.open(file) as opened:
            return opened.read()

    def _unpacked(self, file: File) -> Iterator[bytes]:
        suffix = next(end for end in COMPRESSED if file.path.lower().endswith(end))
        with self.raw(file) as packed:
            try:
                stream = _OPENERS[suffix](packed)
                while piece := stream.read(_PIECE):
                    yield piece
            except DataUnreachable:
                raise
            except (EOFError, zlib.error, lzma.LZMAError, pa.ArrowException, gzip.BadGzipFile, OSError) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise  # the disk or the store, not what is compressed
                what = f"cannot be unpacked ({error or type(error).__name__})"
                raise DataError(file.path, what, "copy or download the file again, or write it again") from None


def each(look: Callable[[File], T], files: Sequence[File]) -> list[T]:
    """What ``look`` finds in each file, in order; several remote ones at once, as each answer takes its time.

    Raises what the first of the failing looks raises.
    """
    if not any(file.remote for file in files):
        return [look(file) for file in files]
    with ThreadPoolExecutor(TOGETHER, "look") as pool:
        return list(pool.map(look, files))


class RangeFile(io.RawIOBase):
    """Random access to a remote file by ranges: for a look at its end, where copying it all would be too much."""

    def __init__(self, file: File) -> None:
        self._file, self._at = file, 0
        bucket, self._key = split_s3(file.path)
        self._client = client(bucket)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._file.size - self._at)]
        view = view[:CHUNK_BYTES]
        with reaching():
            got = self._client.read_into(self._key, view, self._at) if len(view) else 0
        self._at += got
        return got
