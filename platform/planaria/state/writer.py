"""Writing one durable checkpoint: shards by many ranks, then one commit."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from planaria.state.boxes import Box
from planaria.state.checksum import BLOCK, DIGEST_BYTES, block_bytes, block_count, digest
from planaria.state.dtypes import code_of
from planaria.state.errors import CheckpointError, Fenced, StorageUnavailable
from planaria.state.index import Index, Slice, SliceError
from planaria.state.manifest import NAME, Manifest, ManifestError
from planaria.state.names import FolderName
from planaria.state.shard import Shard, bytes_of, encode_header
from planaria.state.storage import Storage

_TOGETHER = 1 << 19
"""Bytes to hash before they are written: few enough to stay in the processor's cache."""


@dataclass(frozen=True)
class Piece:
    """What one rank stores of one tensor.

    Attributes:
        tensor: global name.
        global_shape: shape of the whole tensor.
        box: the part that ``data`` fills.
        data: CPU tensor of shape ``box.shape``; must not change until it is written.
        checksums: digests of the blocks of ``data``, as :func:`planaria.state.checksum.block_digests` gives them, if
            they are known already; else they are made while it is written.
    """

    tensor: str
    global_shape: tuple[int, ...]
    box: Box
    data: torch.Tensor
    checksums: bytes | None = None

    @property
    def key(self) -> str:
        """Name inside the shard file: the tensor's own where it is whole."""
        return self.tensor if self.box == Box.whole(self.global_shape) else f"{self.tensor}{self.box}"


class CheckpointWriter:
    """One attempt to write the checkpoint of one step.

    All ranks make one with the same step and token, in any process, and call :meth:`write_shard`; the
    coordinator gathers their slices and calls :meth:`commit`. A failure removes the whole attempt.
    """

    def __init__(
        self,
        storage: Storage,
        step: int,
        token: str,
        committed: Callable[[FolderName, str], None],
        fence: Callable[[], None] = lambda: None,
        block: int = BLOCK,
    ) -> None:
        self._storage, self._committed, self._fence = storage, committed, fence
        self._block = block
        self._token, self._final = token, FolderName(step)
        self._temp = str(FolderName(step, "tmp", token))

    def write_shard(self, writer_id: int, pieces: Iterable[Piece]) -> list[Slice]:
        """Write this rank's pieces to ``shard-<writer_id>.safetensors``, durably.

        Empty boxes are skipped, except of tensors that have no element at all.

        Returns:
            The slices to hand to :meth:`commit`; none, and no file, if nothing was to be written.

        Raises:
            Fenced: it failed, and another process has claimed the vault since.
            CheckpointError: a piece contradicts itself, or the disk is full or fails.
        """
        if writer_id < 0:
            raise CheckpointError(f"writer_id {writer_id} must not be negative")
        file = self._storage.shard_file(writer_id, self._token)
        chosen = {piece.key: piece for piece in _checked(pieces, self._block)}
        # Largest items first, so that every tensor starts aligned to its dtype.
        ordered = sorted(chosen.values(), key=lambda piece: (-piece.data.element_size(), piece.key))
        if not ordered:
            return []
        head = encode_header((p.key, code_of(p.data.dtype), p.box.shape, p.data.nbytes) for p in ordered)
        slices: list[Slice] = []

        def chunks() -> Iterator[bytes | memoryview]:
            yield head
            for piece in ordered:
                digests = yield from self._blocks(piece)
                code, nbytes = code_of(piece.data.dtype), piece.data.nbytes
                slices.append(
                    Slice(piece.tensor, piece.global_shape, code, piece.box, file, piece.key, digests, nbytes)
                )

        needed = len(head) + sum(piece.data.nbytes for piece in ordered)
        try:
            self._storage.write(self._temp, file, chunks())
        except OSError as error:
            raise self._failed(file, error, needed) from error
        except StorageUnavailable:
            self.abort()
            raise
        return slices

    def commit(
        self,
        slices: Iterable[Slice],
        meta: Mapping[str, Any],
        expected: Mapping[str, Sequence[int]] | None = None,
    ) -> str:
        """Make the checkpoint visible, then remove what it supersedes.

        Args:
            slices: what all ranks' :meth:`write_shard` returned.
            meta: the job's own JSON values.
            expected: shapes of all tensors that must be there, to notice one that nobody wrote.

        Returns:
            Path of the checkpoint.

        Raises:
            Fenced: another process has claimed the vault since; nothing was changed.
            CheckpointError: a tensor is not completely covered (the message lists what is missing), a
                shard is not what its writer reported, or the disk is full or fails. The attempt is
                removed; older checkpoints are untouched.
        """
        try:
            index = _complete(self._storage.path(self._temp), slices, expected)
            manifest = Manifest(self._final.step, meta, self._sizes(index), index, self._block).encode()
            try:
                aside = self._aside()
                self._fence()
                self._storage.publish(self._temp, str(self._final), aside, manifest)
            except OSError as error:
                raise self._failed(NAME, error, len(manifest)) from error
        except ManifestError as error:
            self.abort()
            raise CheckpointError(f"{self._storage.path(self._temp)}: {error}") from None
        except CheckpointError:
            self.abort()
            raise
        self._committed(self._final, self._token)
        return self._storage.path(str(self._final))

    def abort(self) -> None:
        """Remove the attempt. Harmless if there is none, or if it is committed, or if another claimed the vault."""
        try:
            self._fence()
            self._storage.remove(self._temp, via=str(FolderName(self._final.step, "gone", self._token)))
        except (OSError, CheckpointError):
            return  # the next commit's clean-up takes it; the first error is the one to report

    def _blocks(self, piece: Piece) -> Generator[memoryview, None, bytes]:
        """The bytes of a piece, some blocks at a time; returns the digests of all."""
        data = bytes_of(piece.data.contiguous())
        if piece.checksums is not None:
            yield data
            return piece.checksums
        digests: list[bytes] = []
        size = block_bytes(len(data), self._block)
        some = size * max(1, _TOGETHER // size)
        for start in range(0, len(data), some):
            blocks = data[start : start + some]
            digests += [digest(blocks[at : at + size]) for at in range(0, len(blocks), size)]
            yield blocks  # written while the cache still holds them
        return b"".join(digests)

    def _sizes(self, index: Index) -> dict[str, int]:
        """Sizes of the shard files, each compared with what its writer reported."""
        sizes: dict[str, int] = {}
        name = ""
        try:
            with closing(self._storage.open_files(self._temp)) as files:
                for name, slices in index.by_file().items():
                    with closing(files.open(name)) as blob:
                        Shard(blob).check(slices)
                        sizes[name] = blob.size
        except OSError as error:
            raise self._failed(name, error, 0) from error
        return sizes

    def _aside(self) -> str:
        taken, number, aside = self._storage.folders(), 1, FolderName(self._final.step, "old", self._token)
        while str(aside) in taken:
            number, aside = number + 1, FolderName(self._final.step, "old", f"{self._token[:48]}-{number}")
        return str(aside)

    def _failed(self, file: str, error: OSError, needed: int) -> CheckpointError:
        try:
            self._fence()
        except Fenced as fenced:  # whoever took over swept the attempt away: that is the cause, not the missing file
            return fenced
        except (OSError, CheckpointError):
            pass  # the first error is the one to report
        self.abort()
        path = self._storage.path(self._temp, file)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return CheckpointError(
                f"{path}: no space: {needed} bytes needed, {self._free()} bytes free after removing this attempt; free "
                f"space, lower checkpoint.keep_last or point storage elsewhere. Older checkpoints are untouched"
            )
        reason = error.strerror or os.strerror(error.errno or 0)
        return CheckpointError(
            f"{path}: {reason} ({needed} bytes to write, {self._free()} bytes free); check that the folder "
            f"exists, is writable and mounted. This attempt is removed, older checkpoints are untouched"
        )

    def _free(self) -> str:
        try:
            free = self._storage.free()
        except OSError:
            free = None
        return "unknown" if free is None else str(free)


def _checked(pieces: Iterable[Piece], block: int) -> Iterator[Piece]:
    seen: set[str] = set()
    for piece in pieces:
        whole = Box.whole(piece.global_shape)
        if len(piece.box.shape) != len(whole.shape) or not whole.contains(piece.box):
            raise CheckpointError(f"{piece.tensor}{piece.box} exceeds its tensor of shape {piece.global_shape}")
        if tuple(piece.data.shape) != piece.box.shape:
            raise CheckpointError(f"{piece.tensor}{piece.box}: data has the shape {tuple(piece.data.shape)}")
        if piece.data.device.type != "cpu":
            raise CheckpointError(f"{piece.tensor}{piece.box}: data is on {piece.data.device}; copy it to the CPU")
        blocks = block_count(piece.data.nbytes, block)
        if piece.checksums is not None and len(piece.checksums) != DIGEST_BYTES * blocks:
            raise CheckpointError(
                f"{piece.tensor}{piece.box}: {len(piece.checksums)} bytes of digests given, its {blocks} blocks have "
                f"{DIGEST_BYTES} each"
            )
        if piece.key in seen or piece.key in ("", "__metadata__"):
            raise CheckpointError(f"{piece.tensor}{piece.box}: given twice, or a name that a shard cannot hold")
        seen.add(piece.key)
        if not piece.box.empty or whole.empty:
            yield piece


def _complete(path: str, slices: Iterable[Slice], expected: Mapping[str, Sequence[int]] | None) -> Index:
    try:
        index = Index.of(slices)
    except (SliceError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    problems = [f"{name}{box}" for name, boxes in index.missing().items() for box in boxes]
    for name, shape in (expected or {}).items():
        held = index.tensors.get(name)
        if held is None:
            problems.append(f"{name} (all of it)")
        elif held[0].global_shape != tuple(shape):
            problems.append(f"{name} of shape {tuple(shape)} (written as {held[0].global_shape})")
    if problems:
        shown = ", ".join(problems[:20]) + (f" and {len(problems) - 20} more" if len(problems) > 20 else "")
        raise CheckpointError(f"{path}: incomplete, so not committed; missing: {shown}")
    return index
