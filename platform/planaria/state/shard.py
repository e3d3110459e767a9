"""Shard files: the safetensors format, read by position and checked against the index.

Written and parsed here rather than through the library: writing needs the file to be fsynced and a
full disk to be an ``OSError``, and reading must check the very bytes that it hands out, which a
memory map of a file that may shrink or sit behind a URL cannot do. Any safetensors reader opens them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from planaria.state.errors import CheckpointDamaged
from planaria.state.index import Slice
from planaria.state.storage import Blob

_HEADER_LIMIT = 1 << 30


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor inside a shard file: dtype code, shape, first byte and byte past the last, in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy; writing to them writes to the tensor."""
    # Tensors of one element or none count as contiguous whatever their strides, at which a view takes offence.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def encode_header(items: Iterable[tuple[str, str, Sequence[int], int]]) -> bytes:
    """Header of a safetensors file whose tensors (key, dtype code, shape, bytes) follow in this order."""
    tree: dict[str, object] = {}
    start = 0
    for key, dtype, shape, nbytes in items:
        tree[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + nbytes]}
        start += nbytes
    raw = json.dumps(tree, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)  # the format wants the data aligned
    return struct.pack("<Q", len(raw)) + raw


class Shard:
    """An open shard file and its header."""

    def __init__(self, blob: Blob) -> None:
        self.blob = blob
        self.entries = _read_header(blob)

    def check(self, slices: Iterable[Slice]) -> None:
        """Compare the header with the index.

        Raises:
            CheckpointDamaged: the file holds a slice differently, or not at all.
        """
        for item in slices:
            entry = self.entries.get(item.key)
            if entry is None:
                raise CheckpointDamaged(self.blob.path, str(item), f"the file has no entry {item.key!r}")
            if (entry.dtype, entry.shape, entry.stop - entry.start) != (item.dtype, item.box.shape, item.nbytes):
                raise CheckpointDamaged(
                    self.blob.path,
                    str(item),
                    f"the file holds {entry.dtype} {entry.shape}, the manifest says {item.dtype} {item.box.shape}",
                )


def _read_header(blob: Blob) -> dict[str, Entry]:
    def damaged(reason: str) -> CheckpointDamaged:
        return CheckpointDamaged(blob.path, None, reason)

    if blob.size < 8:
        raise damaged(f"truncated: {blob.size} bytes are no safetensors file")
    prefix = bytearray(8)
    count = blob.read_into(memoryview(prefix), 0)
    (length,) = struct.unpack("<Q", prefix)
    base = 8 + length
    if count < 8 or length > _HEADER_LIMIT or base > blob.size:
        raise damaged(f"its header of {length} bytes does not fit the file of {blob.size} bytes")
    raw = bytearray(length)
    blob.read_into(memoryview(raw), 8)
    try:
        tree = json.loads(raw)
        entries = {
            key: Entry(
                entry["dtype"],
                tuple(entry["shape"]),
                base + entry["data_offsets"][0],
                base + entry["data_offsets"][1],
            )
            for key, entry in tree.items()
            if key != "__metadata__"
        }
        end = max((entry.stop for entry in entries.values()), default=base)
        ordered = all(base <= entry.start <= entry.stop for entry in entries.values())
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise damaged("its header is not readable") from None
    if not ordered or end != blob.size:
        raise damaged(f"the file has {blob.size} bytes, its header describes {end}")
    return entries
