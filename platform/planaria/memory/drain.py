"""Writing a snapshot that lies in shared memory as one rank's shard of a durable checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from planaria.memory.shelf import Stack
from planaria.state.dtypes import dtype_of
from planaria.state.writer import Piece


def pieces(stack: Stack, buffer: int) -> Iterator[Piece]:
    """The slices that this rank contributes to checkpoints, as views of the shared memory."""
    for at, entry in enumerate(stack.table.entries):
        if entry.primary:
            dtype = dtype_of(entry.dtype)
            if entry.nbytes:
                data = torch.frombuffer(stack.entry_view(buffer, at), dtype=dtype).view(entry.box.shape)
            else:
                data = torch.empty(entry.box.shape, dtype=dtype)
            yield Piece(entry.tensor, entry.global_shape, entry.box, data)
