"""Parameters that do not train: DeepSpeed's optimizers know nothing of them, yet they are part of the state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from planaria.engine.zero.fragments import PARTITIONED, Fragment, share
from planaria.engine.zero.partition import Named
from planaria.recipe import StateReader
from planaria.state.boxes import Box


@dataclass(frozen=True)
class Frozen:
    """One frozen parameter.

    Where DeepSpeed casts the module to bf16, its float32 values are kept beside it, each rank a share of them, so that
    a checkpoint holds what it was given.
    """

    item: Named
    fragment: Fragment
    buffer: Tensor
    """Flat; laid out like the fragment. Shares memory with the parameter unless ``beside``."""
    beside: bool

    def wanted(self) -> list[tuple[str, Box]]:
        """What :meth:`load` will read."""
        name = f"model/{self.item.name}"
        boxes = [(name, box) for box, _ in self.fragment.boxes]
        whole = Box.whole(self.item.shape)
        return [*boxes, (name, whole)] if self._fills_module and (name, whole) not in boxes else boxes

    def load(self, state: StateReader) -> None:
        """Take the values from ``state``."""
        name = f"model/{self.item.name}"
        for box, view in self.fragment.views(self.buffer):
            view.copy_(state.read(name, box))
        if self._fills_module:
            self.item.parameter.copy_(state.read(name, Box.whole(self.item.shape)))
        elif self.beside:
            self._shard[: self.buffer.numel()].copy_(self.buffer)

    @property
    def _fills_module(self) -> bool:
        return self.beside and not hasattr(self.item.parameter, "ds_tensor")

    @property
    def _shard(self) -> Tensor:
        return self.item.parameter.ds_tensor  # type: ignore[attr-defined]


def frozen_of(items: Iterable[Named], stage: int, *, beside: bool, rank: int, world: int) -> list[Frozen]:
    """The frozen parameters as ``rank`` holds them at a ZeRO stage; ``beside``: keep float32 values apart."""
    found = []
    for item in items:
        if stage < 3 and not beside:
            fragment, buffer = Fragment.whole(item.name, item.shape, 0), item.parameter.detach().view(-1)
        else:
            start, stop = share(item.numel, rank, world)
            fragment = Fragment(item.name, item.shape, start, stop, 0, 0, PARTITIONED)
            if beside:
                buffer = torch.empty(stop - start, dtype=torch.float32, device=item.parameter.device)
            else:
                buffer = item.parameter.ds_tensor.detach()  # type: ignore[attr-defined]
        found.append(Frozen(item, fragment, buffer, beside))
    return found
