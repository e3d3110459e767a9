"""Writing a snapshot that lies in shared memory as one rank's shard of a durable checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from planaria.memory.shelf import Stack
from planaria.memory.views import views
from planaria.state.writer import Piece


def pieces(stack: Stack, buffer: int) -> Iterator[Piece]:
    """The slices that this rank contributes to checkpoints, as views of the shared memory."""
    for entry, data in zip(stack.table.entries, views(stack.buffers[buffer].map, stack.table), strict=True):
        if entry.primary:
            yield Piece(entry.tensor, entry.global_shape, entry.box, data)
