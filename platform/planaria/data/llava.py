"""JSON and JSONL files of conversations or captions, with pictures beside them."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from planaria.data.cache import Handles
from planaria.data.columns import Kind
from planaria.data.errors import DataError, DataUnreachable
from planaria.data.files import File
from planaria.data.reading import Reader
from planaria.data.rows import Shard
from planaria.data.text import parsed
from planaria.recipe import BadSample

MAX_OPEN = 16
LOOKED_AT = 100
"""Records from which the kinds of the keys are told."""


class JsonRows:
    """Implements :class:`planaria.data.rows.Rows`, one record per row.

    Only the places of the lines are kept in memory. A JSON list has no lines: it is written to the cache as JSONL once.

    Raises:
        DataError: a file that is neither JSONL nor a JSON list of records, or unreadable.
    """

    def __init__(self, files: Sequence[File], reader: Reader) -> None:
        as_lines = [_is_list(file, reader) for file in files]
        self._handles = Handles(partial(_open, reader, list(files), as_lines), MAX_OPEN)
        self._lines: list[NDArray[np.int64]] = []
        for number, file in enumerate(files):
            try:
                with _open(reader, files, as_lines, number) as opened:
                    self._lines.append(_line_starts(opened))
            except (DataError, DataUnreachable):
                raise
            except OSError as error:
                remedy = "check the path and its permissions"
                raise DataError(file.path, f"cannot be read ({error.strerror or error})", remedy) from None
        self.shards: Sequence[Shard] = tuple(
            Shard(file, len(lines)) for file, lines in zip(files, self._lines, strict=True)
        )
        self._starts = [0, *accumulate(shard.samples for shard in self.shards)]
        self.kinds: Mapping[str, Kind] = self._kinds()

    def __len__(self) -> int:
        return self._starts[-1]

    def select(self, columns: Sequence[str]) -> None:
        """A record is parsed as a whole."""

    def row(self, index: int) -> Mapping[str, Any]:
        number, at = self._place(index)
        start, size = self._lines[number][at].tolist()
        record = parsed(self._handles.read(number, start, size), self.name(index), "record")
        if not isinstance(record, dict):
            raise BadSample(self.name(index), f"the record is no mapping but {type(record).__name__}")
        return record

    def name(self, index: int) -> str:
        number, at = self._place(index)
        return f"{self.shards[number].file.name}/{at}"

    def close(self) -> None:
        self._handles.close()

    def _place(self, index: int) -> tuple[int, int]:
        number = bisect_right(self._starts, index) - 1
        return number, index - self._starts[number]

    def _kinds(self) -> dict[str, Kind]:
        kinds: dict[str, Kind] = {}
        broken: BadSample | None = None
        for index in range(min(LOOKED_AT, len(self))):
            try:
                record = self.row(index)
            except BadSample as error:
                broken = broken or error
                continue
            for name, value in record.items():
                if value is not None and kinds.get(name, "other") == "other":
                    kinds[name] = _kind(value)
        if broken is not None and not kinds:
            raise DataError(self.shards[0].file.path, str(broken), "write one JSON record per line, or a JSON list")
        return kinds


def _kind(value: Any) -> Kind:
    if isinstance(value, str):
        return "text"
    if isinstance(value, list):
        return "messages" if any(isinstance(item, dict) for item in value) else "pictures"
    return "other"


def _is_list(file: File, reader: Reader) -> bool:
    try:
        with reader.open(file) as opened:
            return opened.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["
    except (DataError, DataUnreachable):
        raise
    except OSError as error:
        remedy = "check the path and its permissions"
        raise DataError(file.path, f"cannot be read ({error.strerror or error})", remedy) from None


def _open(reader: Reader, files: Sequence[File], as_lines: Sequence[bool], number: int) -> BinaryIO:
    file = files[number]
    if not as_lines[number]:
        return reader.open(file)
    return reader.derived(file, "lines", partial(_lines_of_list, file.path))


def _lines_of_list(path: str, opened: BinaryIO) -> Iterator[bytes]:
    """A JSON list as JSONL. Records are read one by one, so that only the text is in memory as a whole."""
    remedy = "write a JSON list of records, or one record per line"
    try:
        text = opened.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(path, f"not UTF-8 (byte {error.start})", "save it as UTF-8") from None
    decoder = json.JSONDecoder()
    at = _skip(text, 0, "[")
    while at < len(text) and text[at] != "]":
        try:
            record, at = decoder.raw_decode(text, at)
        except (json.JSONDecodeError, RecursionError) as error:
            raise DataError(path, f"not a JSON list of records ({error})", remedy) from None
        yield json.dumps(record).encode() + b"\n"
        at = _skip(text, at, "")
        if text[at : at + 1] == ",":
            at = _skip(text, at, ",")
        elif text[at : at + 1] != "]":
            what = "ends in mid-list" if at >= len(text) else f"has no comma between records at character {at}"
            raise DataError(path, f"not a JSON list of records: it {what}", remedy)
    if at >= len(text):
        raise DataError(path, "not a JSON list of records: it ends in mid-list", remedy)


def _skip(text: str, at: int, mark: str) -> int:
    """The place behind white space, ``mark``, and white space."""
    while text[at : at + 1] in (" ", "\n", "\r", "\t"):
        at += 1
    if not mark:
        return at
    assert text[at] == mark
    return _skip(text, at + 1, "")


def _line_starts(opened: BinaryIO) -> NDArray[np.int64]:
    """Offset and size of every line that is not blank, int64 [lines, 2]."""
    places: list[tuple[int, int]] = []
    at = 0
    for line in opened:
        if line.strip():
            places.append((at, len(line)))
        at += len(line)
    return np.array(places, dtype=np.int64).reshape(-1, 2)
