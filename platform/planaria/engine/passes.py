"""Forward and backward over the micro-batches of one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from planaria.layout import Layout
from planaria.recipe import Recipe

At = Callable[[str, int], None]
"""Told (phase, micro-batch) as a step gets ahead."""


class Passes(Protocol):
    """How the micro-batches of a step go through the model."""

    def run(self, batches: Sequence[Mapping[str, Tensor]], scale: float, at: At) -> Tensor:
        """Accumulate the gradient of ``scale`` times the sum of all target losses.

        Args:
            batches: this data-parallel rank's micro-batches, on the device.
            scale: factor on every loss.
            at: told of progress.

        Returns:
            This rank's share of the unscaled loss sum, a float64 scalar on the device; the shares of all ranks of
            one data-parallel replica (its tp, cp and pp ranks) add up to the replica's loss sum.
        """
        ...


class AccumulatedPasses:
    """One micro-batch after the other through a whole model, as every layout without pipeline stages does."""

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        units: Sequence[FSDPModule],
        layout: Layout,
        *,
        counts_loss: bool,
        accumulate_whole: bool = False,
    ) -> None:
        self._recipe, self._model, self._units = recipe, model, units
        self._counts_loss = counts_loss
        self._each_time = layout.dp_shard > 1 and not accumulate_whole

    def run(self, batches: Sequence[Mapping[str, Tensor]], scale: float, at: At) -> Tensor:
        """See :meth:`Passes.run`."""
        total: Tensor | None = None
        for index, batch in enumerate(batches):
            at("step", index)
            self._reduce_gradients(last=index == len(batches) - 1)
            loss = self._recipe.loss(self._model, batch)
            (loss * scale).backward()
            total = loss.detach().double() if total is None else total + loss.detach().double()
        assert total is not None  # a step has at least one micro-batch, be it of fillers
        # Ranks of one tensor-parallel group compute the same loss; it counts once.
        return total if self._counts_loss else torch.zeros_like(total)

    def _reduce_gradients(self, *, last: bool) -> None:
        """Before each micro-batch: where gradients are sharded, every one is reduce-scattered, so that they never
        need more memory than their shard, unless that memory is granted (``communication.accumulate: whole``); what
        costs no memory to postpone is sent once, after the last."""
        for module in self._units:
            if self._each_time:
                module.set_requires_all_reduce(last, recurse=False)
            else:
                module.set_requires_gradient_sync(last, recurse=False)
