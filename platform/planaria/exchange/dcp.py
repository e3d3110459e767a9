"""A directory that torch.distributed.checkpoint has saved, read without groups and without its pickles."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from planaria.exchange.dcp_metadata import NAME, Chunk, read_metadata
from planaria.exchange.errors import ExchangeError
from planaria.state.boxes import Box


class DcpSource:
    """Implements :class:`planaria.exchange.source.Source`, whatever number of ranks wrote the directory.

    Raises:
        ExchangeError: no ``.metadata``, one that is not as torch writes it, or files that are missing or too short.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.label = str(folder)
        self._metadata = read_metadata(self.folder)
        chunks = [chunk for entry in self._metadata.tensors.values() for chunk in entry.chunks]
        self._check_files([*chunks, *self._metadata.objects.values()])

    @staticmethod
    def is_one(folder: Path) -> bool:
        """Whether ``folder`` says that it is such a directory."""
        return (folder / NAME).is_file()

    @property
    def objects(self) -> frozenset[str]:
        """Names of what is no tensor."""
        return frozenset(self._metadata.objects)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self._metadata.tensors.items()}

    def read(self, key: str) -> torch.Tensor:
        entry = self._metadata.tensors[key]
        whole = Box.whole(entry.shape)
        if len(entry.chunks) == 1 and entry.chunks[0].box == whole:
            return self._chunk(key, entry.chunks[0], entry.dtype)
        result = torch.empty(entry.shape, dtype=entry.dtype)
        for chunk in entry.chunks:
            result[chunk.box.relative_to(whole)] = self._chunk(key, chunk, entry.dtype)
        return result

    def read_object(self, key: str) -> Any:
        """One object of plain values (numbers, texts, lists, tensors).

        Raises:
            ExchangeError: it is of another kind, or damaged.
        """
        return self._load(key, self._metadata.objects[key])

    def _chunk(self, key: str, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
        tensor = self._load(key, chunk)
        if not isinstance(tensor, torch.Tensor):
            raise ExchangeError(f"{self.folder / chunk.file}: {key}: a {type(tensor).__name__} where a tensor belongs")
        if tuple(tensor.shape) != chunk.box.shape or tensor.dtype != dtype:
            raise ExchangeError(
                f"{self.folder / chunk.file}: {key}{chunk.box}: holds {tensor.dtype} {list(tensor.shape)}, but {NAME} "
                f"says {dtype} {list(chunk.box.shape)}; is the directory of one checkpoint?"
            )
        return tensor.detach()

    def _load(self, key: str, chunk: Chunk) -> Any:
        path = self.folder / chunk.file
        try:
            with path.open("rb") as file:
                file.seek(chunk.offset)
                raw = file.read(chunk.length)
        except OSError as error:
            raise ExchangeError(f"{path}: {key}: cannot be read: {error.strerror}") from None
        try:
            _check_bytes(raw)
            # weights_only: tensors and plain values; nothing that the archive names is called.
            return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            reason = str(error).strip().partition("\n")[0]
            raise ExchangeError(
                f"{path}: {key}: refused, or damaged: it is no plain tensor or value ({reason})"
            ) from None
        except Exception as error:  # zip, storage sizes: whatever damaged bytes can break
            reason = str(error).strip().partition("\n")[0]
            raise ExchangeError(f"{path}: {key}: damaged ({reason}); copy the directory again") from None

    def _check_files(self, chunks: list[Chunk]) -> None:
        ends: dict[str, int] = {}
        for chunk in chunks:
            ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.offset + chunk.length)
        problems = []
        for file, end in sorted(ends.items()):
            path = self.folder / file
            if not path.is_file():
                problems.append(f"{path}: missing")
            elif path.stat().st_size < end:
                problems.append(f"{path}: {path.stat().st_size} bytes, {NAME} says at least {end}")
        if problems:
            raise ExchangeError("\n".join(problems) + "\ncopy the directory again, with the files of all ranks")


def _check_bytes(raw: bytes) -> None:
    """Compare an archive with the CRC-32 that ``torch.save`` puts into it, and ``torch.load`` does not look at."""
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        written = any(item.CRC for item in archive.infolist())  # torch.serialization.set_crc32_options(False): zeros
        if written and (name := archive.testzip()):
            raise zipfile.BadZipFile(f"{name} does not match its CRC-32")
