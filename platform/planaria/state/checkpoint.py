"""Reading one durable checkpoint, in any layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import torch

from planaria.state.boxes import Box
from planaria.state.checksum import checksum
from planaria.state.dtypes import dtype_of
from planaria.state.errors import CheckpointDamaged, CheckpointError
from planaria.state.index import Index, Slice, SliceError
from planaria.state.manifest import NAME, Manifest, ManifestError
from planaria.state.shard import Shard, bytes_of
from planaria.state.storage import Blob, FileOpener, Storage


class Checkpoint:
    """An open checkpoint. Its files stay open, so that removing it meanwhile does not disturb a reader.

    Thread-safe: reads are by position, and the only shared state is the set of verified slices.

    Attributes:
        step: number of completed optimizer steps.
        meta: the job's own JSON values.
        nbytes: size of its shard files together.
        path: folder, or its address.
        index: where every slice is.
    """

    def __init__(self, path: str, manifest: Manifest, shards: Mapping[str, Shard]) -> None:
        self.path = path
        self.step = manifest.step
        self.meta: Mapping[str, Any] = manifest.meta
        self.nbytes = sum(manifest.files.values())
        self.index: Index = manifest.index
        self._shards = shards
        self._verified: set[tuple[str, str]] = set()

    @classmethod
    def open(cls, storage: Storage, folder: str) -> Checkpoint:
        """Open ``folder`` after a shallow check: manifest and its checksum, size and header of every file.

        Raises:
            CheckpointDamaged: names the file and what is wrong with it; a line for every further file.
        """
        manifest_path = storage.path(folder, NAME)
        try:
            files = storage.open_files(folder)
        except OSError as error:
            raise CheckpointDamaged(storage.path(folder), None, f"cannot be opened: {error.strerror}") from error
        shards: dict[str, Shard] = {}
        try:
            try:
                manifest = Manifest.decode(_read_all(files, NAME, manifest_path))
            except ManifestError as error:
                raise CheckpointDamaged(manifest_path, None, str(error)) from None
            problems: list[CheckpointDamaged] = []
            for name, slices in manifest.index.by_file().items():
                path = storage.path(folder, name)
                try:
                    shards[name] = _open_shard(files, name, path)
                    size = shards[name].blob.size
                    if manifest.files.get(name) != size:
                        raise CheckpointDamaged(
                            path, None, f"{size} bytes, the manifest says {manifest.files.get(name)}"
                        )
                    shards[name].check(slices)
                except CheckpointDamaged as error:
                    problems.append(error)
            if problems:
                first, *others = problems
                reason = "\n".join([first.reason, *map(str, others)])
                raise CheckpointDamaged(first.file, first.slice, reason)
            if gaps := manifest.index.missing():
                name, boxes = next(iter(gaps.items()))
                raise CheckpointDamaged(manifest_path, f"{name}{boxes[0]}", "no slice holds it")
        except BaseException:
            for shard in shards.values():
                shard.blob.close()
            raise
        finally:
            files.close()
        return cls(storage.path(folder), manifest, shards)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of all tensors."""
        return tuple(self.index.tensors)

    def global_shape(self, tensor: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self._slices(tensor)[0].global_shape

    def dtype(self, tensor: str) -> torch.dtype:
        """Dtype of the tensor as stored."""
        return dtype_of(self._slices(tensor)[0].dtype)

    def read(self, tensor: str, box: Box | None = None) -> torch.Tensor:
        """A fresh CPU tensor with the elements of ``box`` (default: all), from whatever slices hold them.

        Every slice is verified the first time it is touched, for which it is read as a whole; later
        reads fetch only the rows they need.

        Raises:
            CheckpointDamaged: a slice is not what was written.
            CheckpointError: no such tensor, or ``box`` exceeds it.
        """
        box = box if box is not None else Box.whole(self.global_shape(tensor))
        dtype = self.dtype(tensor)
        try:
            parts = self.index.lookup(tensor, box)
        except (SliceError, ValueError) as error:
            raise CheckpointError(f"{self.path}: {error}") from None
        if len(parts) == 1 and parts[0][0].box == box:
            return self._part(parts[0][0], box)
        result = torch.empty(box.shape, dtype=dtype)
        for item, common in parts:
            result[common.relative_to(box)] = self._part(item, common)
        return result

    def verify(self) -> list[str]:
        """Check every slice that has not been yet; one line per damaged one, naming file and slice."""
        problems: list[str] = []
        for item in self.index:
            if (item.file, item.key) not in self._verified:
                try:
                    self._whole(item)
                except CheckpointDamaged as error:
                    problems.append(str(error))
        return problems

    def close(self) -> None:
        """Close the files. Reading afterwards is an error."""
        for shard in self._shards.values():
            shard.blob.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def _slices(self, tensor: str) -> list[Slice]:
        if tensor not in self.index.tensors:
            raise CheckpointError(f"{self.path}: holds no tensor {tensor!r}")
        return self.index.tensors[tensor]

    def _part(self, item: Slice, box: Box) -> torch.Tensor:
        """The elements of ``box``, which lies in ``item``."""
        at = box.relative_to(item.box)
        if (item.file, item.key) not in self._verified:
            return self._whole(item)[at]
        if not at:
            return self._shards[item.file].read(item)
        rows = self._shards[item.file].read(item, at[0].start, box.shape[0])
        return rows[(slice(None), *at[1:])]

    def _whole(self, item: Slice) -> torch.Tensor:
        shard = self._shards[item.file]
        tensor = shard.read(item)
        if checksum(bytes_of(tensor)) != item.checksum:
            raise CheckpointDamaged(shard.blob.path, str(item), "its bytes do not match their checksum")
        self._verified.add((item.file, item.key))
        return tensor


def _open_shard(files: FileOpener, name: str, path: str) -> Shard:
    blob = _open(files, name, path)
    try:
        return Shard(blob)
    except OSError as error:
        blob.close()
        raise CheckpointDamaged(path, None, f"cannot be read: {error.strerror}") from error
    except BaseException:
        blob.close()
        raise


def _read_all(files: FileOpener, name: str, path: str) -> bytearray:
    blob = _open(files, name, path)
    try:
        raw = bytearray(blob.size)
        del raw[blob.read_into(memoryview(raw), 0) :]
        return raw
    except OSError as error:
        raise CheckpointDamaged(path, None, f"cannot be read: {error.strerror}") from error
    finally:
        blob.close()


def _open(files: FileOpener, name: str, path: str) -> Blob:
    try:
        return files.open(name)
    except FileNotFoundError:
        raise CheckpointDamaged(path, None, "the file is missing") from None
    except OSError as error:
        raise CheckpointDamaged(path, None, f"cannot be opened: {error.strerror}") from error
