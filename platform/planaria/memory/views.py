"""The slices of a snapshot as tensors."""

from __future__ import annotations

from mmap import mmap

import torch
from torch import Tensor

from planaria.memory.buffers import HEADER_BYTES
from planaria.memory.table import Table
from planaria.state.dtypes import dtype_of


def views(memory: mmap, table: Table) -> list[Tensor]:
    """The entries of a snapshot as tensors that share its memory."""
    found: list[Tensor] = []
    for entry in table.entries:
        dtype = dtype_of(entry.dtype)
        if entry.nbytes:
            count = entry.nbytes // dtype.itemsize
            flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=HEADER_BYTES + entry.offset)
            found.append(flat.view(entry.box.shape))
        else:
            found.append(torch.empty(entry.box.shape, dtype=dtype))
    return found
