"""Hugging Face data sets saved on disk: Arrow files, mapped into memory."""

from __future__ import annotations

import json
import mmap
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from planaria.data.arrowtypes import kinds_of
from planaria.data.columns import Kind
from planaria.data.errors import DataError, DataUnreachable
from planaria.data.files import File
from planaria.data.reading import Reader, each
from planaria.data.rows import Shard
from planaria.recipe import BadSample

MAPPED = 16
"""Files that stay mapped."""
_REBUILD = "copy or download the data set again, or save it again"


class ArrowRows:
    """Implements :class:`planaria.data.rows.Rows` over Arrow streams and files, in the given order.

    Args:
        files: the data files.
        reader: opens them; what it has unpacked or copied keeps its row counts in the cache.
        picked: rows of a data set that was selected or shuffled; None: all, in their order.

    Raises:
        DataError: a file that cannot be read, is damaged, or has other columns than the first.
    """

    def __init__(self, files: Sequence[File], reader: Reader, picked: np.ndarray | None = None) -> None:
        self._reader, self._files = reader, list(files)
        shards: list[Shard] = []
        self._batches: list[list[int]] = []
        kinds: dict[str, Kind] | None = None
        for file, (found, counts) in zip(files, each(self._look, files), strict=True):
            if kinds is not None and found != kinds:
                what = f"has the columns {', '.join(found)}, but {files[0].name} has {', '.join(kinds)}"
                raise DataError(file.path, what, "name one data set in data.path")
            kinds = found
            shards.append(Shard(file, sum(counts)))
            self._batches.append([0, *accumulate(counts)])
        self.kinds: Mapping[str, Kind] = kinds or {}
        self._starts = [0, *accumulate(shard.samples for shard in shards)]
        self._picked = picked
        if picked is not None and len(picked) and int(picked.max()) >= self._starts[-1]:
            what = f"its indices name row {int(picked.max())}, but there are {self._starts[-1]}"
            raise DataError(files[0].folder, what, _REBUILD)
        # Picked rows lie anywhere in the files, so they make one shard.
        self.shards: Sequence[Shard] = tuple(shards) if picked is None else (Shard(files[0], len(picked)),)
        self._columns: list[str] = list(self.kinds)
        self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._mapped: OrderedDict[int, list[pa.RecordBatch]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_mapped")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def __len__(self) -> int:
        return self._starts[-1] if self._picked is None else len(self._picked)

    def select(self, columns: Sequence[str]) -> None:
        self._columns = list(columns)

    def row(self, index: int) -> Mapping[str, Any]:
        file, at = self._place(index)
        batches = self._map(file)
        starts = self._batches[file]
        number = bisect_right(starts, at) - 1
        batch = batches[number]
        try:
            return {name: batch.column(name)[at - starts[number]].as_py() for name in self._columns}
        except (UnicodeDecodeError, pa.ArrowException) as error:
            raise BadSample(self.name(index), f"the row cannot be read ({error})") from None

    def name(self, index: int) -> str:
        file, at = self._place(index)
        return f"{self._files[file].name}/{at}"

    def close(self) -> None:
        with self._lock:
            self._mapped.clear()

    def _place(self, index: int) -> tuple[int, int]:
        row = index if self._picked is None else int(self._picked[index])
        file = bisect_right(self._starts, row) - 1
        return file, row - self._starts[file]

    def _map(self, number: int) -> list[pa.RecordBatch]:
        with self._lock:
            batches = self._mapped.pop(number, None)
            if batches is None:
                with self._reader.open(self._files[number]) as opened:
                    batches = list(_read_batches(opened))
            self._mapped[number] = batches
            while len(self._mapped) > MAPPED:
                self._mapped.popitem(last=False)
            return batches

    def _look(self, file: File) -> tuple[dict[str, Kind], list[int]]:
        """Columns, and rows of each batch."""
        try:
            if not file.remote:
                with self._reader.open(file) as opened:
                    return _summary(opened)
            # Each process would copy the file once more after it was dropped from the cache; this stays.
            with self._reader.derived(file, "rows", lambda opened: [json.dumps(_summary(opened)).encode()]) as kept:
                kinds, counts = json.load(kept)
                return kinds, counts
        except (DataError, DataUnreachable):
            raise
        except (pa.ArrowException, ValueError, OSError) as error:
            first_line = str(error).strip().partition("\n")[0]
            raise DataError(file.path, f"not a readable Arrow file ({first_line})", _REBUILD) from None


def _summary(opened: BinaryIO) -> tuple[dict[str, Kind], list[int]]:
    reader = _open(opened)
    return kinds_of(reader.schema), [batch.num_rows for batch in _batches(reader)]


def _read_batches(opened: BinaryIO) -> Iterator[pa.RecordBatch]:
    return _batches(_open(opened))


def _open(opened: BinaryIO) -> Any:
    """Arrow's stream or file format; nothing is read yet, and no page belongs to this process."""
    mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    buffer = pa.py_buffer(mapped)
    return pa.ipc.open_file(buffer) if mapped[:6] == b"ARROW1" else pa.ipc.open_stream(buffer)


def _batches(reader: Any) -> Iterator[pa.RecordBatch]:
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        return (reader.get_batch(number) for number in range(reader.num_record_batches))
    return iter(reader)


def saved_files(files: Sequence[File], reader: Reader, where: str) -> tuple[list[File], np.ndarray | None]:
    """The data files of a folder that ``Dataset.save_to_disk`` wrote, in order, and the rows that are picked of them.

    Files beside them (caches of transformations) are left out. Without a ``state.json``, all ``.arrow`` files.

    Raises:
        DataError: several data sets, or a file that is named but not there.
    """
    by_path = {file.path: file for file in files}
    states = [file for file in files if file.name == "state.json"]
    if not states:
        return [file for file in files if file.name.endswith(".arrow")], None
    if len(states) > 1:
        splits = ", ".join(state.folder for state in states)
        raise DataError(where, f"holds several data sets: {splits}", "set data.path and data.val_path to one of them")
    try:
        state = json.loads(reader.text(states[0]))
        names = [entry["filename"] for entry in state["_data_files"]]
        indices = [entry["filename"] for entry in state.get("_indices_files") or []]
    except (DataError, DataUnreachable):
        raise
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise DataError(states[0].path, f"not the state of a saved data set ({error!r})", _REBUILD) from None
    paths = [f"{states[0].folder}/{name}" for name in names + indices]
    if missing := [path for path in paths if path not in by_path]:
        raise DataError(missing[0], f"not there, but {states[0].path} names it", _REBUILD)
    picked = None
    if indices:
        tables = []
        for path in paths[len(names) :]:
            with reader.open(by_path[path]) as opened:
                tables.append(pa.Table.from_batches(list(_read_batches(opened))))
        picked = pa.concat_tables(tables).column(0).to_numpy().astype(np.int64)
    return [by_path[path] for path in paths[: len(names)]], picked
