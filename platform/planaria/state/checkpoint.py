"""Reading one durable checkpoint, in any layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch

from planaria.state.blocks import SliceBytes
from planaria.state.boxes import Box
from planaria.state.dtypes import dtype_of
from planaria.state.errors import CheckpointDamaged, CheckpointError
from planaria.state.fetch import Rows, Run, plan
from planaria.state.index import Index, Slice, SliceError
from planaria.state.manifest import NAME, Manifest, ManifestError
from planaria.state.scratch import Memory, Scratch
from planaria.state.shard import Shard
from planaria.state.storage import Blob, FileOpener, Storage
from planaria.state.uncollected import uncollected

_ELSEWHERE = 1 << 28
"""Bytes to hold on the CPU, at about most, of what goes to other devices or is converted."""


class Checkpoint:
    """An open checkpoint. Its files stay open, so that removing it meanwhile does not disturb a reader.

    Thread-safe: reads are by position, and the only shared state is which blocks are verified.

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
        self._block = manifest.block
        self._bytes: dict[tuple[str, str], SliceBytes] = {}

    @classmethod
    @uncollected()
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

        Every block is verified the first time it is touched; where the box ends inside of one, the rest of it is
        read for that.

        Raises:
            CheckpointDamaged: a block is not what was written.
            CheckpointError: no such tensor, or ``box`` exceeds it.
        """
        box = box if box is not None else Box.whole(self.global_shape(tensor))
        self._lookup(tensor, box)
        out = torch.empty(box.shape, dtype=self.dtype(tensor))
        self.read_into([(tensor, box, out)])
        return out

    @uncollected()
    def read_into(self, wanted: Iterable[tuple[str, Box, torch.Tensor]]) -> None:
        """Like :meth:`read`, for many boxes, each into a tensor of its shape, converted to its dtype and device.

        Into contiguous CPU memory of the stored dtype, bytes go without any copy on the way. Files are read from front
        to back. After an error the contents of the tensors are undefined.

        Raises:
            CheckpointError: besides, a tensor has not the shape of its box.
        """
        steps: list[Run | Rows] = []
        elsewhere: list[tuple[torch.Tensor, torch.Tensor]] = []
        scratch = Scratch()
        # All is planned before anything is read: large reads empty the caches, and Python after each is slow.
        for tensor, box, out in wanted:
            if sum(value.nbytes for _, value in elsewhere) > _ELSEWHERE:
                _carry_out(steps, elsewhere, scratch)
                steps, elsewhere = [], []
            parts = [(self._source(item), part) for item, part in self._lookup(tensor, box)]
            if tuple(out.shape) != box.shape:
                raise CheckpointError(f"{self.path}: {tensor}{box} does not fit a tensor of shape {tuple(out.shape)}")
            if out.device.type != "cpu" or out.dtype != self.dtype(tensor):
                elsewhere.append((out, torch.empty(box.shape, dtype=self.dtype(tensor))))
                out = elsewhere[-1][1]
            steps += plan(parts, box, out)
        _carry_out(steps, elsewhere, scratch)

    def verify(self) -> list[str]:
        """Check every block that has not been yet; one line per damaged slice, naming file, slice and bytes."""
        problems: list[str] = []
        aside = Memory()
        for item in self.index:
            try:
                self._source(item).verify(aside)
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

    def _source(self, item: Slice) -> SliceBytes:
        key = (item.file, item.key)
        found = self._bytes.get(key)
        if found is None:  # of two threads that come here at once, one makes it for both
            found = self._bytes.setdefault(key, SliceBytes(self._shards[item.file], item, self._block))
        return found

    def _slices(self, tensor: str) -> list[Slice]:
        if tensor not in self.index.tensors:
            raise CheckpointError(f"{self.path}: holds no tensor {tensor!r}")
        return self.index.tensors[tensor]

    def _lookup(self, tensor: str, box: Box) -> list[tuple[Slice, Box]]:
        self._slices(tensor)
        try:
            return self.index.lookup(tensor, box)
        except (SliceError, ValueError) as error:
            raise CheckpointError(f"{self.path}: {error}") from None


def _carry_out(steps: list[Run | Rows], elsewhere: list[tuple[torch.Tensor, torch.Tensor]], scratch: Scratch) -> None:
    for step in sorted(steps, key=lambda step: (step.source.place, step.start)):
        step.fetch(scratch)
    with torch.no_grad():
        for target, value in elsewhere:
            target.copy_(value)


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
