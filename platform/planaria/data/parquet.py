"""Parquet files with random access: whole row groups are read, and the last ones kept."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from planaria.data.arrowtypes import kinds_of
from planaria.data.columns import Kind
from planaria.data.errors import DataError, DataUnreachable
from planaria.data.files import File
from planaria.data.reading import RangeFile, Reader, each
from planaria.data.rows import Shard
from planaria.recipe import BadSample

KEPT_BYTES = 256 << 20
"""Row groups that are kept, in bytes of the columns in use; the last one stays however large it is."""


class ParquetRows:
    """Implements :class:`planaria.data.rows.Rows`. Only the footers are read here.

    Raises:
        DataError: a file that cannot be read, is damaged, or has other columns than the first.
    """

    def __init__(self, files: Sequence[File], reader: Reader) -> None:
        self._reader, self._files = reader, list(files)
        self._groups: list[tuple[int, int]] = []
        """(file, group in it) of every row group."""
        shards: list[Shard] = []
        totals: list[int] = []
        schema: pa.Schema | None = None
        for number, (file, metadata) in enumerate(zip(files, each(_metadata, files), strict=True)):
            found = metadata.schema.to_arrow_schema()
            if schema is None:
                schema = found
            elif kinds_of(found) != kinds_of(schema):
                what = f"has the columns {_listed(found)}, but {files[0].name} has {_listed(schema)}"
                raise DataError(file.path, what, "write all files with the same columns, or name fewer in data.path")
            counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
            self._groups += [(number, group) for group, count in enumerate(counts) if count]
            shards += [Shard(file, count) for count in counts if count]
            totals.append(sum(counts))
        assert schema is not None  # find_files gives at least one
        self.shards: Sequence[Shard] = tuple(shards)  # row groups: what is read at once
        self.kinds: Mapping[str, Kind] = kinds_of(schema)
        self._starts = [0, *accumulate(shard.samples for shard in shards)]
        self._first = [0, *accumulate(totals)]
        self._columns: list[str] = list(self.kinds)
        self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, tuple[pa.StructArray, int]] = OrderedDict()
        """Row groups in use, with their sizes in bytes: to ask for a size takes as long as to read a row."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_kept")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def __len__(self) -> int:
        return self._starts[-1]

    def select(self, columns: Sequence[str]) -> None:
        self._columns = list(columns)

    def row(self, index: int) -> Mapping[str, Any]:
        number = bisect_right(self._starts, index) - 1
        group = self._group(number, index)
        try:
            row: Mapping[str, Any] = group[index - self._starts[number]].as_py()
            return row
        except (UnicodeDecodeError, pa.ArrowException) as error:
            raise BadSample(self.name(index), f"the row cannot be read ({error})") from None

    def name(self, index: int) -> str:
        number = bisect_right(self._first, index) - 1
        return f"{self._files[number].name}/{index - self._first[number]}"

    def close(self) -> None:
        with self._lock:
            self._kept.clear()

    def _group(self, number: int, index: int) -> pa.StructArray:
        with self._lock:  # two threads must not read one group twice; decoding of pictures runs beside it
            kept = self._kept.pop(number, None)
            if kept is not None:
                self._kept[number] = kept  # the last to go
                return kept[0]
            group = self._read(number, index)
            self._kept[number] = group, group.nbytes
            while len(self._kept) > 1 and sum(size for _, size in self._kept.values()) > KEPT_BYTES:
                self._kept.popitem(last=False)
            return group

    def _read(self, number: int, index: int) -> pa.StructArray:
        file, group = self._groups[number]
        with self._reader.raw(self._files[file]) as opened:
            try:
                table = pq.ParquetFile(opened).read_row_group(group, columns=self._columns)
                rows = table.to_struct_array()
                return rows.chunk(0) if rows.num_chunks == 1 else rows
            except (pa.ArrowException, OSError) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise
                what = f"row group {group} of {self._files[file].name} cannot be read ({_first_line(error)})"
                raise BadSample(self.name(index), what) from None


def _metadata(file: File) -> pq.FileMetaData:
    remedy = "copy or download the file again, or write it again"
    try:
        if file.remote:
            return pq.read_metadata(RangeFile(file))
        return pq.read_metadata(file.path)
    except (DataError, DataUnreachable):
        raise
    except (pa.ArrowException, OSError) as error:
        raise DataError(file.path, f"not a readable Parquet file ({_first_line(error)})", remedy) from None


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _listed(schema: pa.Schema) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in kinds_of(schema).items())
