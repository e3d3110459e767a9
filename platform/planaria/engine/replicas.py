"""Digests of what data-parallel replicas hold, compared in one small collective.

Only the axis ``dp_replicate`` is compared: its ranks receive the same sum of gradients, bit for bit. Ranks along
``tp`` hold some parameters twice, too, but compute part of their gradients each for itself, and kernels that add up in
no fixed order let these drift apart lawfully.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from planaria.engine.sharded import Shard
from planaria.layout import Layout
from planaria.state.holdings import holders
from planaria.state.replicas import Comparison, compared, group_of
from planaria.state.shard import bytes_of

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 1 << 22
"""Words that are weighted at a time: 64 MiB beside the parameters."""
MIX = 0x5851F42D4C957F2D
"""Odd (it is the multiplier of Knuth's MMIX generator), so that to multiply by it loses no bit modulo 2^64."""


def compare(
    shards: Sequence[Shard], units: Sequence[str], layout: Layout, mesh: DeviceMesh, device: torch.device
) -> Comparison | None:
    """Compare the shards of this rank with those of its replicas; collective.

    None but on the first rank of each group of replicas. Where nothing is replicated rank 0 says so.
    """
    rank = mesh.get_rank()
    if layout.dp_replicate == 1:
        return Comparison((), 0, ()) if rank == 0 else None
    named = [(shard.name, shard.local()) for shard in shards]
    ranks = holders(layout, rank, ["dp_replicate"])
    return compare_tensors(named, units, ranks, rank, mesh.get_group("dp_replicate"), device)


def compare_tensors(
    named: Iterable[tuple[str, Tensor]],
    units: Sequence[str],
    ranks: Sequence[int],
    rank: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> Comparison | None:
    """Compare tensors, by name, with those of the other ``ranks`` of ``group``; collective over it.

    None but on the first of ``ranks``.
    """
    by_group: dict[str, list[Tensor]] = {}
    for name, tensor in named:
        by_group.setdefault(group_of(name, units), []).append(tensor)
    digest = exact_digest if device.type == "cpu" else bit_sums
    own = torch.stack([digest(tensors) for tensors in by_group.values()])
    gathered = own.new_empty(len(ranks) * len(own))
    dist.all_gather_single(gathered, own, group=group)
    if rank != ranks[0]:
        return None
    return compared(ranks, list(by_group), gathered.view(len(ranks), -1).tolist())


def exact_digest(tensors: Sequence[Tensor]) -> Tensor:
    """XXH3 of the bytes of CPU tensors, as an int64 scalar."""
    state = xxhash.xxh3_64()
    for tensor in tensors:
        if tensor.numel():
            state.update(bytes_of(tensor.contiguous()))
    return torch.tensor(int.from_bytes(state.digest(), "big", signed=True))


def bit_sums(tensors: Sequence[Tensor]) -> Tensor:
    """A checksum made on the device of the tensors, as an int64 scalar.

    The bits, taken for integers, times odd weights that grow, summed modulo 2^64: no single flipped bit can leave the
    sum as it was, and words that change places show, too.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    weights = torch.arange(1, 2 * min(CHUNK, max(1, *(t.numel() for t in tensors))), 2, device=total.device)
    for tensor in tensors:
        words = tensor.contiguous().reshape(-1).view(INTEGERS[tensor.element_size()])
        for chunk in words.split(CHUNK):
            total = total * MIX + (chunk * weights[: chunk.numel()]).sum()
    return total
