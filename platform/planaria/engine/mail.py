"""Tensors between the stages of a pipeline.

Every rank of a pipeline sees the same micro-batches, so the form (shape, dtype) of what arrives is a function of the
forms of the batch: it is sent along once for each new form of batch, and known to both sides from then on. Sending
never waits; receiving waits for the one message that is asked for. So a schedule cannot deadlock that an event
simulation has played to its end.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LONGEST = 8
"""Dims that a tensor may have."""


@dataclass(frozen=True)
class Form:
    """What a message looks like."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    """Whether the sender waits for a gradient of it."""

    @classmethod
    def of(cls, value: Tensor) -> Form:
        """The form of ``value``."""
        if value.dim() > LONGEST or value.dtype not in DTYPES:
            raise TypeError(f"no stage can send {value.dtype} {list(value.shape)}: give hidden states as floats")
        return cls(tuple(value.shape), value.dtype, value.requires_grad)

    def pack(self) -> Tensor:
        """As int64 [3 + LONGEST]."""
        head = [len(self.shape), DTYPES.index(self.dtype), int(self.requires_grad), *self.shape]
        return torch.tensor(head + [0] * (3 + LONGEST - len(head)))

    @classmethod
    def unpack(cls, words: Tensor) -> Form:
        """Inverse of :meth:`pack`."""
        dims, dtype, requires_grad, *shape = words.tolist()
        return cls(tuple(shape[:dims]), DTYPES[dtype], bool(requires_grad))


class Mail:
    """Messages of one rank to others of its pipeline.

    On CUDA they travel through the memory of the host, over gloo: NCCL pairs messages by their order alone, which the
    two ends of a pipeline do not share.

    Args:
        group: the ranks of one pipeline.
        device: where the tensors are.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._forms: dict[Hashable, Form] = {}
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def send(self, value: Tensor, to: int, tag: int) -> None:
        """Send ``value`` to rank ``to`` of the group; both sides know its form."""
        payload = value.detach().contiguous().cpu()
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]
        if payload.numel():
            work = dist.isend(payload, group=self._group, group_dst=to, tag=tag)
            assert work is not None
            self._sent.append((work, payload))

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, source: int, tag: int) -> Tensor:
        """What rank ``source`` of the group sends under ``tag``."""
        payload = torch.empty(shape, dtype=dtype)
        if payload.numel():
            work = dist.irecv(payload, group=self._group, group_src=source, tag=tag)
            assert work is not None
            work.wait()
        return payload.to(self._device)

    def announce(self, value: Tensor, key: Hashable, to: int, tag: int) -> None:
        """Send the form of ``value`` if that of ``key`` is not known yet, then ``value``."""
        form = Form.of(value)
        if key not in self._forms:
            self._forms[key] = form
            self.send(form.pack(), to, tag)
        elif self._forms[key] != form:
            raise RuntimeError(f"a stage's output changed from {self._forms[key]} to {form} for batches of one form")
        self.send(value, to, tag)

    def hear(self, key: Hashable, source: int, tag: int) -> tuple[Tensor, bool]:
        """Inverse of :meth:`announce`: the value, and whether the sender waits for its gradient."""
        if key not in self._forms:
            self._forms[key] = Form.unpack(self.receive((3 + LONGEST,), torch.int64, source, tag).cpu())
        form = self._forms[key]
        return self.receive(form.shape, form.dtype, source, tag), form.requires_grad

    def flush(self) -> None:
        """Wait until everything is sent."""
        for work, _ in self._sent:
            work.wait()
        self._sent = []
