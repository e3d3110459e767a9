"""One pass over a tar shard: where each sample's picture and caption lie, so that training can seek to them."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from planaria.data.errors import DataError

IMAGE_EXTENSIONS = frozenset({"png", "jpg", "jpeg", "webp", "gif", "bmp", "tif", "tiff"})
_REBUILD = "copy or download the shard again, or write it again"


@dataclass(frozen=True, slots=True)
class Span:
    """A member's bytes in its shard."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One sample. A missing member is no error here: the sample is bad when it is read."""

    key: str
    image: Span | None
    text: Span | None
    json: Span | None


def split_key(name: str) -> tuple[str, str] | None:
    """(key, lower-case extension) of a member: the base name is cut at its FIRST dot, directories stay in the key.

    None for names that take no part: without an extension, or hidden (``.DS_Store``, ``._x.jpg``).
    """
    directory, slash, base = name.removeprefix("./").rpartition("/")
    stem, dot, extension = base.partition(".")
    if not stem or not dot or not extension:
        return None
    return directory + slash + stem, extension.lower()


def index_shard(path: Path) -> list[Entry]:
    """The samples of an uncompressed tar file; see :func:`index_tar`."""
    try:
        with open(path, "rb") as opened:
            return index_tar(opened, str(path))
    except OSError as error:
        raise DataError(str(path), f"cannot be read ({error.strerror})", "check the path and its permissions") from None


def index_tar(opened: BinaryIO, path: str) -> list[Entry]:
    """The samples of an uncompressed tar file, in file order; ``path`` names it in errors.

    Raises:
        OSError: it cannot be read now.
        DataError: the shard is truncated, damaged or no tar file (with the byte offset), a key
            occurs twice or in separate places, or dots in names give one key several pictures or captions.
    """
    entries: list[Entry] = []
    done: dict[str, set[str]] = {}
    key, members = "", dict[str, Span]()
    for name, span in _members(opened, path):
        parts = split_key(name)
        if parts is None:
            continue
        if parts[0] != key:
            if members:
                entries.append(_entry(path, key, members))
                done[key] = set(members)
            key, members = parts[0], {}
        extension = parts[1]
        if extension in members or extension in done.get(key, ()):
            remedy = "give every sample of a shard its own key"
            raise DataError(path, f"key {key!r} occurs twice ({extension} at offset {span.offset})", remedy)
        if key in done:
            what = f"the members of key {key!r} do not lie together ({extension} at offset {span.offset})"
            raise DataError(path, what, "write the shard sorted by name")
        members[extension] = span
    if members:
        entries.append(_entry(path, key, members))
    return entries


def _entry(path: str, key: str, members: dict[str, Span]) -> Entry:
    picks = [_pick(path, key, members, wanted) for wanted in (IMAGE_EXTENSIONS, {"txt"}, {"json"})]
    return Entry(key, *(members[extension] if extension else None for extension in picks))


def _pick(path: str, key: str, extensions: Iterable[str], wanted: Iterable[str]) -> str | None:
    """The one extension that is wanted: plain (``jpg``), else the last part of a dotted one (``b.jpg``)."""
    plain = [extension for extension in extensions if extension in wanted]
    found = plain or [extension for extension in extensions if extension.rpartition(".")[2] in wanted]
    if len(found) > 1:
        what = f"key {key!r} has {' and '.join(sorted(found))}, and only one can be meant"
        raise DataError(path, what, "keys end at the first dot of a name: rename files that hold further dots")
    return found[0] if found else None


def _members(opened: BinaryIO, path: str) -> Iterator[tuple[str, Span]]:
    """(name, span) of the regular files, with the checks that the standard reader leaves out."""
    reached = 0
    size = os.fstat(opened.fileno()).st_size
    try:
        with tarfile.open(fileobj=opened, mode="r:") as tar:
            while (member := tar.next()) is not None:
                end = member.offset_data + member.size
                if member.isreg() and end > size:
                    what = f"truncated: {member.name!r} should end at byte {end}, the file ends at {size}"
                    raise DataError(path, what, _REBUILD)
                if member.issparse():
                    raise DataError(path, f"{member.name!r} is a sparse file", "write it without holes")
                if member.isreg():
                    yield member.name, Span(member.offset_data, member.size)
                reached = end
                tar.members.clear()  # type: ignore[attr-defined]  # or the reader keeps every header
            _check_end(opened, path, tar.offset)
    except DataError:
        raise
    except (tarfile.TarError, ValueError) as error:
        what = f"not a readable, uncompressed tar file from offset {reached} on ({error}; the file has {size} bytes)"
        raise DataError(
            path, what, f"{_REBUILD}; compressed shards are named .tar.gz, .tar.bz2, .tar.xz or .tar.zst"
        ) from None


def _check_end(opened: BinaryIO, path: str, offset: int) -> None:
    # The standard reader takes a damaged header or a missing end for the end of the archive: silent loss.
    opened.seek(offset)
    block = opened.read(tarfile.BLOCKSIZE)
    if len(block) < tarfile.BLOCKSIZE:
        what = f"truncated: no end-of-archive mark at offset {offset}"
        raise DataError(path, what, f"{_REBUILD} (its writer may not have been closed)")
    if any(block):
        raise DataError(path, f"damaged: no valid member header at offset {offset}", _REBUILD)
