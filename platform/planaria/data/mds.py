"""MDS shards, the format of MosaicML Streaming, with random access.

A shard is the number of samples, the offset of each and of the end (uint32), a header, and the samples. A sample is
the sizes of its columns of variable size (uint32), then all columns. What each file is stands in ``index.json``.
"""

from __future__ import annotations

import io
import json
import struct
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from planaria.data.cache import Handles
from planaria.data.columns import Kind
from planaria.data.errors import DataError, DataUnreachable
from planaria.data.files import File
from planaria.data.reading import COMPRESSED, Reader
from planaria.data.rows import Shard
from planaria.data.text import parsed
from planaria.recipe import BadSample

MAX_OPEN = 16
_REBUILD = "copy or download the data set again, or write it again"

_KINDS: dict[str, Kind] = {
    "str": "text",
    "bytes": "bytes",
    "jpeg": "picture",
    "png": "picture",
    "pil": "picture",
    "json": "messages",
}
_NUMBERS = {"int", "str_int", "str_float", "str_decimal"}


@dataclass(frozen=True)
class _Column:
    name: str
    encoding: str
    size: int | None
    """In bytes; None: it stands before each sample."""


class MdsRows:
    """Implements :class:`planaria.data.rows.Rows`. Only ``index.json`` is read here.

    Args:
        files: all files of the folder, ``index.json`` and shards.
        reader: opens them.
        where: names the data set in errors.

    Raises:
        DataError: no index or several, one that is damaged or of another format, or a shard that is not there.
    """

    def __init__(self, files: Sequence[File], reader: Reader, where: str) -> None:
        indices = [file for file in files if file.name == "index.json"]
        if len(indices) != 1:
            what = f"has {len(indices)} files index.json, not one: {', '.join(file.folder for file in indices)}"
            raise DataError(where, what, "set data.path to the folder of one data set")
        index, by_path = indices[0], {file.path: file for file in files}
        try:
            entries = json.loads(reader.text(index))["shards"]
            found = [_shard(entry, index, by_path) for entry in entries]
            columns = [_columns(entry) for entry in entries]
        except (DataError, DataUnreachable):
            raise
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise DataError(index.path, f"not an index of MDS shards ({error!r})", _REBUILD) from None
        if any(other != columns[0] for other in columns):
            raise DataError(index.path, "its shards have different columns", "write one data set per folder")
        self.shards: Sequence[Shard] = tuple(found)
        self._columns: list[_Column] = columns[0] if columns else []
        self.kinds: Mapping[str, Kind] = {
            column.name: _KINDS.get(column.encoding.partition(":")[0], "other") for column in self._columns
        }
        self._starts = [0, *accumulate(shard.samples for shard in found)]
        self._wanted = set(self.kinds)
        self._handles = Handles(partial(_open, reader, found), MAX_OPEN)

    def __len__(self) -> int:
        return self._starts[-1]

    def select(self, columns: Sequence[str]) -> None:
        self._wanted = set(columns)

    def row(self, index: int) -> Mapping[str, Any]:
        number = bisect_right(self._starts, index) - 1
        shard, at, key = self.shards[number], index - self._starts[number], self.name(index)
        head = self._handles.read(number, 4 * (1 + at), 8)
        begin, end = struct.unpack("<II", head) if len(head) == 8 else (0, 0)
        data = self._handles.read(number, begin, end - begin) if 4 * (2 + shard.samples) <= begin <= end else b""
        if not data or len(data) < end - begin:
            raise BadSample(key, f"{shard.file.name} is truncated or damaged at offset {begin}")
        return self._decode(data, key)

    def name(self, index: int) -> str:
        number = bisect_right(self._starts, index) - 1
        return f"{self.shards[number].file.name}/{index - self._starts[number]}"

    def close(self) -> None:
        self._handles.close()

    def _decode(self, data: bytes, key: str) -> dict[str, Any]:
        variable = sum(column.size is None for column in self._columns)
        if len(data) < 4 * variable:
            raise BadSample(key, "the sample is shorter than its header")
        sizes = iter(struct.unpack(f"<{variable}I", data[: 4 * variable]))
        at, values = 4 * variable, dict[str, Any]()
        for column in self._columns:
            size = next(sizes) if column.size is None else column.size
            if at + size > len(data):
                raise BadSample(key, f"the column {column.name!r} goes beyond the end of the sample")
            if column.name in self._wanted:
                values[column.name] = _value(column, data[at : at + size], key)
            at += size
        if at < len(data):
            raise BadSample(key, f"the sample has {len(data) - at} bytes more than its columns")
        return values


def _value(column: _Column, data: bytes, key: str) -> Any:
    encoding = column.encoding.partition(":")[0]
    if encoding in ("str", "bytes", "jpeg", "png"):
        return data  # text is decoded where it is used: a damaged caption costs its sample
    if encoding == "json":
        return parsed(data, key, f"column {column.name!r}")
    if encoding == "pil":
        return _raw_picture(data, key)
    if encoding == "int":
        return int(np.frombuffer(data, "<i8")[0])
    if encoding in _NUMBERS:
        return data.decode("ascii", "replace")
    raise BadSample(key, f"the column {column.name!r} has the encoding {column.encoding!r}, which is not read")


def _raw_picture(data: bytes, key: str) -> bytes:
    """A picture that was stored as bare pixels, as a file."""
    try:
        width, height, length = struct.unpack("<III", data[:12])
        mode = data[12 : 12 + length].decode("ascii")
        image = Image.frombytes(mode, (width, height), data[12 + length :])
        out = io.BytesIO()
        image.save(out, "TIFF")  # no compression, and any mode
    except Exception as error:  # Pillow raises nearly anything on damaged bytes
        raise BadSample(key, f"the raw image cannot be decoded ({error})") from None
    return out.getvalue()


def _columns(entry: Mapping[str, Any]) -> list[_Column]:
    return [
        _Column(name, encoding, size or None)
        for name, encoding, size in zip(
            entry["column_names"], entry["column_encodings"], entry["column_sizes"], strict=True
        )
    ]


def _shard(entry: Mapping[str, Any], index: File, by_path: Mapping[str, File]) -> Shard:
    if entry["format"] != "mds" or entry["version"] != 2:
        what = f"describes format {entry['format']!r}, version {entry['version']}, not mds, version 2"
        raise DataError(index.path, what, "write the data set with MDSWriter, or set data.format")
    choices = [entry["raw_data"], entry.get("zip_data")]
    names = [choice["basename"] for choice in choices if choice]
    file = next((by_path[path] for name in names if (path := f"{index.folder}/{name}") in by_path), None)
    if file is None:
        raise DataError(f"{index.folder}/{names[-1]}", f"not there, but {index.path} names it", _REBUILD)
    if file.name == names[0].rpartition("/")[2] and file.size != entry["raw_data"]["bytes"]:
        what = f"has {file.size} bytes, but {index.path} says {entry['raw_data']['bytes']}"
        raise DataError(file.path, what, _REBUILD)
    if file.name != names[0].rpartition("/")[2] and not file.name.endswith(COMPRESSED):
        what = f"is compressed with {entry.get('compression')!r}, which is not read"
        raise DataError(file.path, what, "compress the shards with zstd or gz, or not at all")
    return Shard(file, int(entry["samples"]))


def _open(reader: Reader, shards: Sequence[Shard], number: int) -> BinaryIO:
    return reader.open(shards[number].file)
