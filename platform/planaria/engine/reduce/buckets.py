"""Gradients laid out in flat buckets, each tensor at the beginning of a block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from planaria.engine.sharded import Shard


@dataclass(frozen=True)
class Bucket:
    """Where some shards lie in one flat tensor of ``length`` elements; what is between them stays zero."""

    places: tuple[tuple[int, Shard], ...]
    """(first element, shard)."""
    length: int
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> Tensor:
        """An empty flat tensor."""
        return torch.zeros(self.length, dtype=self.dtype, device=self.device)

    def views(self, flat: Tensor) -> Iterator[tuple[Shard, Tensor]]:
        """Each shard with its part of ``flat``, in its shape."""
        for start, shard in self.places:
            yield shard, flat[start : start + shard.box.numel].view(shard.box.shape)


def buckets_of(shards: Sequence[Shard], limit: int, block: int, pieces: int) -> list[Bucket]:
    """Buckets of at most ``limit`` bytes, or of one shard that is larger; shards keep their order.

    Args:
        block: every shard begins at a multiple of so many elements.
        pieces: every bucket can be cut into so many equal pieces of whole blocks.
    """
    found: list[Bucket] = []
    places: list[tuple[int, Shard]] = []
    end = 0

    def close() -> None:
        local = places[0][1].local()
        found.append(Bucket(tuple(places), _up(end, block * pieces), local.dtype, local.device))

    for shard in shards:
        if not shard.box.numel:
            continue
        local = shard.local()
        full = end and (end + shard.box.numel) * local.element_size() > limit
        if places and (full or places[0][1].local().dtype != local.dtype):
            close()
            places, end = [], 0
        places.append((end, shard))
        end = _up(end + shard.box.numel, block)
    if places:
        close()
    return found


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
