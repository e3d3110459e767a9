"""Which files a path means: a file, a folder or a glob, on a disk or in an object store."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from planaria.data.errors import DataError, DataUnreachable
from planaria.state.errors import StorageUnavailable
from planaria.state.retry import RetryPolicy
from planaria.state.storage import is_url

if TYPE_CHECKING:
    from planaria.state.s3_client import S3Client

POLICY = RetryPolicy()
"""How requests are tried again: as those for checkpoints are."""


@dataclass(frozen=True)
class File:
    """One file of a data set."""

    path: str
    """Absolute local path, or ``s3://bucket/key``."""
    size: int
    """In bytes."""
    version: str
    """Changes with the contents: modification time, or the store's tag."""

    @property
    def remote(self) -> bool:
        """Whether it lies in an object store."""
        return is_url(self.path)

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition("/")[2]

    @property
    def folder(self) -> str:
        """The path up to its name."""
        return self.path.rpartition("/")[0]


def find_files(pattern: str, wanted: Callable[[str], bool] = lambda name: True) -> list[File]:
    """The files that ``pattern`` means, sorted by path.

    Args:
        pattern: a file, a glob (``**`` crosses folders), or a folder, which means the files below it that are
            ``wanted``; local (``~`` is the home directory) or ``s3://bucket/prefix``.
        wanted: by name, for files of a folder. Hidden files and folders are never taken from a folder.

    Raises:
        DataError: nothing there.
        DataUnreachable: the store cannot be used.
    """
    found = _remote(pattern, wanted) if is_url(pattern) else _local(pattern, wanted)
    if not found:
        raise DataError(pattern, "no file matches", "check the path as seen from every node, e.g. data/train-*.tar")
    return sorted(found, key=lambda file: file.path)


def local_file(path: str | Path) -> File:
    """A local file, as it is now; raises ``OSError``."""
    path = os.path.abspath(path)
    stat = os.stat(path)
    return File(path, stat.st_size, str(stat.st_mtime_ns))


def _local(pattern: str, wanted: Callable[[str], bool]) -> list[File]:
    pattern = os.path.expanduser(pattern)
    if os.path.isdir(pattern):
        paths = list(_below(pattern, wanted))
    else:
        paths = [path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)]
    try:
        return [local_file(path) for path in paths]
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
        raise DataError(str(error.filename), what, "check the path and its permissions") from None


def _below(root: str, wanted: Callable[[str], bool]) -> Iterator[str]:
    for folder, folders, files in os.walk(root, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (os.path.join(folder, name) for name in files if not name.startswith(".") and wanted(name))


def _shown(path: str) -> bool:
    return not any(part.startswith(".") for part in path.split("/"))


def _remote(pattern: str, wanted: Callable[[str], bool]) -> list[File]:
    bucket, key = split_s3(pattern)
    literal = re.split(r"[*?\[]", key, maxsplit=1)[0]
    with reaching():
        listed = list(client(bucket).listing(literal))
    if literal != key:
        fits = re.compile(_glob_to_regex(key)).fullmatch
        chosen = [item for item in listed if fits(item.key)]
    else:
        folder = key.rstrip("/") + "/" if key else ""
        chosen = [item for item in listed if item.key == key] or [
            item
            for item in listed
            if item.key.startswith(folder)
            and _shown(item.key.removeprefix(folder))
            and wanted(item.key.rpartition("/")[2])
        ]
    return [File(f"s3://{bucket}/{item.key}", item.size, item.etag) for item in chosen if not item.key.endswith("/")]


def _glob_to_regex(pattern: str) -> str:
    """As ``glob`` has it: ``*`` stays within a folder, ``**/`` crosses folders."""
    wild = {"**/": "(?:.*/)?", "*": "[^/]*", "?": "[^/]"}
    pieces = re.split(r"(\*\*/|\*|\?|\[[^\]]+\])", pattern)
    return "".join(
        wild.get(piece) or (f"[{piece[1:].replace('!', '^', 1)}" if piece.startswith("[") else re.escape(piece))
        for piece in pieces
    )


def split_s3(url: str) -> tuple[str, str]:
    """Bucket and key, or pattern of keys, of an ``s3://`` URL.

    Raises:
        DataError: another scheme, or no bucket; the message holds no password.
    """
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    if scheme != "s3" or not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", bucket):
        what = "is no place for data" if scheme != "s3" else "names no bucket"
        remedy = "give a local path or s3://bucket/prefix; endpoint and keys come from the environment"
        raise DataError(f"{scheme}://...", what, remedy)
    return bucket, key


@lru_cache(maxsize=16)
def client(bucket: str) -> S3Client:
    """Requests to a bucket."""
    from planaria.state.s3_client import S3Client, Timeouts  # s3fs takes a while to import

    return S3Client(bucket, POLICY, Timeouts())


@contextmanager
def reaching() -> Iterator[None]:
    """Around requests: a store that cannot be used is an ``OSError``, as all that another attempt may mend."""
    try:
        yield
    except StorageUnavailable as error:
        raise DataUnreachable(str(error)) from None


def read_all(path: str) -> bytes:
    """All of a file, local or remote. Raises ``OSError``, of an unreachable store too."""
    if not is_url(path):
        return Path(path).read_bytes()
    bucket, key = split_s3(path)
    with reaching():
        return client(bucket).get(key)
