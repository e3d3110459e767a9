"""Sums of flat tensors over a group of ranks with encoded pieces on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from planaria.engine.reduce.codecs import Codec
from planaria.engine.reduce.protocol import FAR
from planaria.engine.wire import Wire, all_gather_bytes, all_to_all_bytes


@dataclass
class _Message:
    data: Tensor
    work: dist.Work


def sum_encoded(
    flats: Sequence[Tensor], codec: Codec, group: dist.ProcessGroup, wire: Wire, *, feedback: bool
) -> list[Tensor]:
    """The sums of ``flats`` over the group, the same to the bit on all its ranks.

    Each rank owns one of R equal pieces. All ranks send it theirs, encoded; it adds them up in full precision,
    encodes the sum and sends it to all, so that each rank sends and receives what a ring of as many encoded bytes
    would, and codes are never added up, which would overflow. Every rank decodes the same bytes, the owner too.

    The messages of all flats are under way at once: while one travels the next is encoded.

    Args:
        flats: lengths must be multiples of R times ``codec.block``.
        feedback: turn each of ``flats``, in place, into what of it did not arrive: the sum over all ranks of what
            is left, plus the result, is the sum of what they were. The error of the second encoding is the owner's.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    sent = [_spread(flat, codec, group, wire, feedback) for flat in flats]
    gathered = [
        _gather(flat, message, codec, group, wire, feedback, (ranks, rank))
        for flat, message in zip(flats, sent, strict=True)
    ]
    sums = []
    for flat, message in zip(flats, gathered, strict=True):
        message.work.wait()
        sums.append(codec.decode(message.data, flat))
    return sums


def _spread(flat: Tensor, codec: Codec, group: dist.ProcessGroup, wire: Wire, feedback: bool) -> _Message:
    data = codec.encode(flat)
    if feedback:
        flat -= codec.decode(data, flat)
    arrived = torch.empty_like(data)
    work = dist.all_to_all_single(arrived, data, group=group, async_op=True)
    ranks = dist.get_world_size(group)
    wire.add(FAR, all_to_all_bytes(data.numel() // ranks, ranks))
    return _Message(arrived, work)


def _gather(
    flat: Tensor,
    message: _Message,
    codec: Codec,
    group: dist.ProcessGroup,
    wire: Wire,
    feedback: bool,
    place: tuple[int, int],
) -> _Message:
    ranks, rank = place
    message.work.wait()
    piece_P = codec.decode(message.data, flat).view(ranks, -1).sum(0)
    data = codec.encode(piece_P)
    if feedback:
        flat.view(ranks, -1)[rank] += piece_P - codec.decode(data, flat)
    whole = data.new_empty(ranks * data.numel())
    work = dist.all_gather_single(whole, data, group=group, async_op=True)
    wire.add(FAR, all_gather_bytes(data.numel(), ranks))
    return _Message(whole, work)
