"""Which format the files of a data set have, told from their names, and the data set that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from planaria.config import DataConfig
from planaria.data.arrow import ArrowRows, saved_files
from planaria.data.cache import Cache, default_folder
from planaria.data.errors import DataError
from planaria.data.files import File, find_files
from planaria.data.llava import JsonRows
from planaria.data.mds import MdsRows
from planaria.data.parquet import ParquetRows
from planaria.data.reading import COMPRESSED, Reader
from planaria.data.rows import Needs, Rows, TableDataset
from planaria.data.webdataset import WebDataset, is_tar

Format = Literal["webdataset", "parquet", "hf", "mds", "llava"]
FileDataset = WebDataset | TableDataset
"""Samples from files; ``shards`` says how many lie in each."""


def format_of(name: str) -> Format | None:
    """Of a file of this name; None: it holds no samples."""
    lower = name.lower()
    bare = next((lower.removesuffix(end) for end in COMPRESSED if lower.endswith(end)), lower)
    if is_tar(name):
        return "webdataset"
    if lower.endswith((".parquet", ".pq")):
        return "parquet"
    if lower.endswith(".arrow"):
        return "hf"
    if bare.endswith(".mds"):
        return "mds"
    return "llava" if bare.endswith((".json", ".jsonl")) else None


def detect(files: Sequence[File], where: str) -> Format:
    """The format of these files. JSON beside shards describes them.

    Raises:
        DataError: files of no known format, or of several.
    """
    found = {format for file in files if (format := format_of(file.name)) is not None}
    shards = sorted(found - {"llava"})
    if len(shards) > 1:
        counts = ", ".join(f"{sum(format_of(file.name) == one for file in files)} {one}" for one in shards)
        raise DataError(where, f"holds files of several formats ({counts})", "set data.format, or name fewer files")
    if shards:
        return shards[0]
    if found:
        return "llava"
    names = ", ".join(file.name for file in files[:5])
    known = "tar (.tar, .tar.gz), Parquet (.parquet), Arrow (.arrow), MDS (.mds) and JSON (.json, .jsonl)"
    raise DataError(where, f"no file of a known format ({names})", f"known are {known}; or set data.format")


def reader_of(config: DataConfig) -> Reader:
    """What opens the files of a job."""
    return Reader(Cache(config.cache_dir or default_folder(), int(config.cache_gib * 2**30)))


def files_of(path: str, config: DataConfig) -> tuple[list[File], Format]:
    """The files at ``path`` and their format; of a folder, those that belong to the format.

    Raises:
        DataError: nothing there, or of no known format.
    """
    try:
        files = find_files(path, lambda name: format_of(name) is not None)  # pictures beside them may be many
    except DataError:
        files = find_files(path)  # to name what is there instead
    format: Format = detect(files, path) if config.format == "auto" else config.format
    if len(files) > 1:  # a single file is what was meant, whatever its name
        described = format in ("hf", "mds")
        belonging = [
            file
            for file in files
            if format_of(file.name) == format or (described and file.name in ("index.json", "state.json"))
        ]
        if not belonging:
            raise DataError(
                path, f"no file of the format {format} among {len(files)}", "correct data.format or data.path"
            )
        files = belonging
    return files, format


def open_files(path: str, config: DataConfig, needs: Needs = Needs()) -> FileDataset:  # noqa: B008 (frozen)
    """The samples of the files at ``path``.

    Args:
        path: a file, folder or glob, local or remote.
        config: format, columns, cache and prompt.
        needs: what makes a sample useless.

    Raises:
        DataError: files that cannot be used.
    """
    files, format = files_of(path, config)
    return open_as(format, files, path, config, needs)


def open_as(
    format: Format,
    files: Sequence[File],
    where: str,
    config: DataConfig,
    needs: Needs = Needs(),  # noqa: B008 (frozen)
) -> FileDataset:
    """The samples of ``files``, which have this format; see :func:`open_files`."""
    reader = reader_of(config)
    if format == "webdataset":
        return WebDataset(files, config.prompt, reader=reader, needs=needs)
    rows = _rows(format, files, reader, where)
    if not len(rows):
        raise DataError(where, f"no samples in {len(files)} file(s)", "check the path and the split")
    root = config.image_root or rows.shards[0].file.folder
    return TableDataset(rows, config.columns, config.prompt, root, needs, where)


def _rows(format: Format, files: Sequence[File], reader: Reader, where: str) -> Rows:
    if format == "parquet":
        return ParquetRows(files, reader)
    if format == "mds":
        return MdsRows(files, reader, where)
    if format == "llava":
        return JsonRows(files, reader)
    saved, picked = saved_files(files, reader, where)
    if not saved:
        raise DataError(where, "no Arrow file", "name a folder that Dataset.save_to_disk wrote, or its .arrow files")
    return ArrowRows(saved, reader, picked)
