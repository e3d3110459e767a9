"""``.metadata`` of a torch.distributed.checkpoint directory, read without running any of its code.

The file is a pickle, and a pickle may call whatever it names. Here it can name the dozen classes that torch's
own writer uses and nothing else, and even these are not torch's: every one is a stand-in, made anew for each file,
that only keeps what it is given. What comes out is checked and copied into the plain values below.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from planaria.exchange.errors import ExchangeError
from planaria.state.boxes import Box, uncovered

NAME = ".metadata"
_LIMIT = 1 << 30
"""Bytes of the largest file that is read: some hundred bytes per chunk make gigabytes implausible."""

_METADATA = "torch.distributed.checkpoint.metadata"
_OLDER = "torch.distributed._shard.sharded_tensor.metadata"
_RECORDS = {
    (_METADATA, "Metadata"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    (_OLDER, "TensorProperties"),  # until torch 2.2
    (_OLDER, "MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
_TUPLES = {("torch", "Size")}
_PATHS = {
    (module, f"{kind}Path") for module in ("pathlib", "pathlib._local") for kind in ("Posix", "PurePosix", "Windows")
}
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_LAYOUT = ("torch.serialization", "_get_layout")


@dataclass(frozen=True)
class Chunk:
    """Where one part of a tensor lies.

    Attributes:
        box: the part.
        file: name of the file, relative to the directory.
        offset: first byte of a ``torch.save`` archive in it.
        length: bytes of the archive.
    """

    box: Box
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the directory; its chunks fill it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Metadata:
    """What a directory holds: tensors, and objects of other kinds (a step, a learning rate) as archives."""

    tensors: Mapping[str, TensorEntry]
    objects: Mapping[str, Chunk]


def read_metadata(folder: Path) -> Metadata:
    """Read and check ``folder/.metadata``.

    Raises:
        ExchangeError: not there, not readable, or not what torch.distributed.checkpoint writes.
    """
    path = folder / NAME
    try:
        if path.stat().st_size > _LIMIT:
            raise ExchangeError(f"{path}: {path.stat().st_size} bytes are too many for a list of tensors")
        raw = path.read_bytes()
    except OSError as error:
        raise ExchangeError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        tree = _Unpickler(raw, path).load()
    except ExchangeError:
        raise
    except Exception as error:  # a pickle can fail in any way
        raise ExchangeError(f"{path}: damaged, or no metadata of torch.distributed.checkpoint ({error!r})") from None
    try:
        return _checked(tree, path)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ExchangeError(
            f"{path}: not in the form that torch.distributed.checkpoint writes ({error!r}); which version wrote it?"
        ) from None


class _Record:
    """Stand-in for a class of torch: keeps its arguments and its state, and does nothing."""

    args: tuple[Any, ...]
    fields: dict[str, Any]

    def __new__(cls, *args: Any, **fields: Any) -> _Record:
        made = super().__new__(cls)
        made.args, made.fields = args, fields
        return made

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.fields = state
        else:
            self.args = state if isinstance(state, tuple) else (state,)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["fields"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __hash__(self) -> int:
        # As a key of storage_data, hashed before its state is there; looked up by none.
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


class _Unpickler(pickle.Unpickler):
    """Resolves the names that torch's writer uses to stand-ins, and no other name to anything."""

    def __init__(self, raw: bytes, path: Path) -> None:
        super().__init__(io.BytesIO(raw))
        self._path = path
        self._made: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        key = (module, name)
        if key not in self._made:
            self._made[key] = self._stand_in(key)
        return self._made[key]

    def persistent_load(self, pid: Any) -> Any:
        raise self._refused("an object outside of it")

    def _stand_in(self, key: tuple[str, str]) -> Any:
        # Classes made here and dropped with the file: nothing that a pickle does to them reaches anyone else.
        if key in _RECORDS:
            return type(key[1], (_Record,), {})
        if key in _TUPLES or key in _PATHS:
            return type(key[1], (_Arguments,), {})
        if key == _LAYOUT:
            return type("layout", (_Record,), {})
        if key[0] == "torch" and key[1] in _DTYPES:
            return _Dtype(_DTYPES[key[1]])
        raise self._refused(f"{key[0]}.{key[1]}")

    def _refused(self, what: str) -> ExchangeError:
        return ExchangeError(
            f"{self._path}: refused: it names {what}, which no metadata of torch.distributed.checkpoint needs. Nothing "
            "of it was run. If you trust its origin, load it there and save it again with torch.distributed.checkpoint"
        )


class _Arguments(tuple[Any, ...]):
    """Stand-in for ``torch.Size`` (one argument, a sequence) and for paths (their parts)."""

    def __new__(cls, *args: Any) -> _Arguments:
        flat = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
        return super().__new__(cls, flat)


@dataclass(frozen=True)
class _Dtype:
    dtype: torch.dtype


def _checked(tree: Any, path: Path) -> Metadata:
    if not isinstance(tree, _Record) or type(tree).__name__ != "Metadata":
        raise ExchangeError(f"{path}: holds no Metadata of torch.distributed.checkpoint")
    places = {}
    for index, info in tree.storage_data.items():
        offset = index.fields.get("offset")
        places[index.fqn, None if offset is None else _sizes(offset)] = _place(info, path)
    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, Chunk] = {}
    for name, entry in tree.state_dict_metadata.items():
        if not isinstance(name, str):
            raise ExchangeError(f"{path}: names a tensor {name!r}, which is no text")
        if type(entry).__name__ == "BytesStorageMetadata":
            objects[name] = Chunk(Box((), ()), *places[name, None])
            continue
        shape = _sizes(entry.size)
        chunks = []
        for chunk in entry.chunks:
            box = Box(_sizes(chunk.offsets), _sizes(chunk.sizes))
            if not Box.whole(shape).contains(box):
                raise ExchangeError(f"{path}: {name}{box} exceeds its tensor of shape {list(shape)}")
            if not box.empty:
                chunks.append(Chunk(box, *places[name, box.offset]))
        if gaps := uncovered(Box.whole(shape), sorted(chunk.box for chunk in chunks)):
            raise ExchangeError(f"{path}: no file holds {name}{gaps[0]}; the directory is incomplete")
        tensors[name] = TensorEntry(shape, entry.properties.args[0].dtype, tuple(chunks))
    return Metadata(tensors, objects)


def _place(info: Any, path: Path) -> tuple[str, int, int]:
    file, offset, length = info.relative_path, info.offset, info.length
    if not isinstance(file, str) or not isinstance(offset, int) or not isinstance(length, int):
        raise TypeError(f"place {file!r}, {offset!r}, {length!r}")
    parts = PurePosixPath(file).parts
    if not parts or file.startswith("/") or ".." in parts or "\x00" in file or offset < 0 or length < 0:
        raise ExchangeError(f"{path}: refused: it points to {file!r} at {offset}, outside of its directory")
    if transforms := info.fields.get("transform_descriptors"):
        raise ExchangeError(
            f"{path}: its files are transformed ({', '.join(map(str, transforms))}), which is not supported; save the "
            "checkpoint again without storage extensions"
        )
    return file, offset, length


def _sizes(value: Any) -> tuple[int, ...]:
    sizes = tuple(value)
    if not all(isinstance(size, int) and not isinstance(size, bool) for size in sizes):
        raise TypeError(f"sizes {sizes!r}")
    return sizes
