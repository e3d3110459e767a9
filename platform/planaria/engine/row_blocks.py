"""Rows that all data-parallel ranks hold, block by block: no rank ever has more than one block."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

AXES = ("dp_shard", "dp_replicate")
"""Ranks that differ on these alone hold different rows."""


class RowBlocks:
    """Implements :data:`planaria.objectives.contrastive.Blocks` for the data-parallel ranks of a mesh.

    A block takes a few rows of every rank, so that its size, hence the memory, does not depend on how many ranks
    there are. Where all rows fit into one block, they are gathered at once.
    """

    def __init__(self, mesh: DeviceMesh, columns: int) -> None:
        """
        Args:
            mesh: has the axes :data:`AXES`.
            columns: most rows of a block; one of every rank is the least.
        """
        self._groups: Sequence[dist.ProcessGroup] = [mesh.get_group(axis) for axis in AXES]
        self._step = max(1, columns // math.prod(group.size() for group in self._groups))

    def __call__(self, rows_NW: Tensor) -> Iterator[Tensor]:
        """Every row of every rank in exactly one block [M, W]; ranks may have different numbers of rows, also none."""
        most = torch.tensor([len(rows_NW)], device=rows_NW.device)
        for group in self._groups:
            dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        for start in range(0, int(most), self._step):
            own = rows_NW[start : start + self._step]
            block = rows_NW.new_zeros(min(self._step, int(most) - start), rows_NW.shape[1] + 1)
            block[: len(own), :-1] = own
            block[: len(own), -1] = 1  # tells rows from padding
            for group in self._groups:
                if group.size() > 1:
                    gathered = block.new_empty(group.size() * len(block), block.shape[1])
                    dist.all_gather_single(gathered, block, group=group)
                    block = gathered
            yield block[block[:, -1] > 0, :-1]
