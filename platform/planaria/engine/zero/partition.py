"""DeepSpeed's state behind one interface, whatever the ZeRO stage.

The only module that reads DeepSpeed's optimizers from inside. All that it relies on is checked when it is made:
names and sizes of the buffers must add up to the model's parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planaria.engine.zero.fragments import PARTITIONED, Fragment


@dataclass(frozen=True)
class Named:
    """A parameter of the model as it was before DeepSpeed cut it."""

    name: str
    shape: tuple[int, ...]
    parameter: nn.Parameter

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Whole:
    """Stage 0: every rank holds everything, and DeepSpeed sums the gradients."""

    average = False
    """Whether DeepSpeed divides gradients by the number of ranks."""

    def __init__(self, engine: Any, trained: list[Named]) -> None:
        self._engine = engine
        self._trained = trained
        self.fragments = [Fragment.whole(item.name, item.shape, at) for at, item in enumerate(trained)]

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that was given to DeepSpeed."""
        return self._engine.optimizer

    @property
    def masters(self) -> list[nn.Parameter | Tensor]:
        """Keys of the optimizer's state, one per group."""
        return [item.parameter for item in self._trained]

    def gradients(self) -> Iterator[Tensor]:
        """What this rank holds of the reduced gradients after the last backward pass, for a norm."""
        for item in self._trained:
            if item.parameter.grad is not None:
                yield item.parameter.grad

    def gradient(self, group: int) -> Tensor:
        """The flat gradient of one group, laid out like its master weights."""
        grad = self._trained[group].parameter.grad
        return torch.zeros(self._trained[group].numel) if grad is None else grad.view(-1)

    def publish(self) -> None:
        """Make the model's own weights those of the master weights; collective."""

    def after_step(self) -> None:
        """Leave nothing of this step for the next."""


class Split:
    """Stages 1 and 2: flat groups of parameters, each cut into one range per rank."""

    average = False

    def __init__(self, engine: Any, trained: list[Named]) -> None:
        self._zero = engine.optimizer
        self._offload = bool(self._zero.cpu_offload)
        self.fragments = []
        for item in trained:
            mapping: Any = item.parameter._hp_mapping  # type: ignore[attr-defined]
            if mapping is None:
                continue  # none of it lies in this rank's range
            start, numel = mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel
            offset = mapping.hp_fragment_address.start
            self.fragments.append(
                Fragment(item.name, item.shape, start, start + numel, mapping.param_group_index, offset, PARTITIONED)
            )

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._zero.optimizer

    @property
    def masters(self) -> list[nn.Parameter | Tensor]:
        return list(self._zero.single_partition_of_fp32_groups)

    def gradients(self) -> Iterator[Tensor]:
        for group, partition in enumerate(self._zero.single_partition_of_fp32_groups):
            if self._offload:
                yield partition.grad
            else:
                yield from self._zero.averaged_gradients[group]

    def gradient(self, group: int) -> Tensor:
        if self._offload:
            return self._zero.single_partition_of_fp32_groups[group].grad
        return torch.cat([part.reshape(-1) for part in self._zero.averaged_gradients[group]])

    def publish(self) -> None:
        self._zero.update_lp_params()

    def after_step(self) -> None:
        if self._offload:  # DeepSpeed overwrites what has a gradient, and would step the rest with that of a past step
            for partition in self._zero.single_partition_of_fp32_groups:
                partition.grad.zero_()
            for accumulated in self._zero.accumulated_grads_in_cpu.values():
                accumulated.zero_()


class Sharded:
    """Stage 3: every parameter is cut into one range per rank, and gathered where it is used."""

    average = True

    def __init__(self, engine: Any, trained: list[Named]) -> None:
        self._zero = engine.optimizer
        self._offload = bool(self._zero.offload_optimizer)
        rank, names = dist.get_rank(), {id(item.parameter): item for item in trained}
        self.fragments = []
        for group, members in enumerate(self._zero.fp16_groups):
            for parameter in members:
                item = names[id(parameter)]
                at, offset, size = self._zero.grad_position[self._zero.get_param_id(parameter)]
                assert at == group, f"{item.name} is in group {at}, not {group}"
                start, stop = min(rank * size, item.numel), min((rank + 1) * size, item.numel)
                self.fragments.append(Fragment(item.name, item.shape, start, stop, group, offset, PARTITIONED))

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._zero.optimizer

    @property
    def masters(self) -> list[nn.Parameter | Tensor]:
        return list(self._zero.fp32_partitioned_groups_flat)

    def gradients(self) -> Iterator[Tensor]:
        for group, flat in enumerate(self._zero.fp32_partitioned_groups_flat):
            if self._offload:
                yield flat.grad
            else:
                yield from self._zero.averaged_gradients[group]

    def gradient(self, group: int) -> Tensor:
        if self._offload:
            return self._zero.fp32_partitioned_groups_flat[group].grad
        return torch.cat([part.reshape(-1) for part in self._zero.averaged_gradients[group]])

    def publish(self) -> None:
        zero = self._zero
        zero._partition_all_parameters()
        for group in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(group)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def after_step(self) -> None:
        # DeepSpeed overwrites the gradients of what was used, and would step the rest with that of a past step.
        self._zero.grad_partitions_flat_buffer.zero_()
        if self._offload:
            for flat in self._zero.fp32_partitioned_groups_flat:
                flat.grad.zero_()


Partition = Whole | Split | Sharded


def partition_of(engine: Any, stage: int, trained: list[Named]) -> Partition:
    """The state of an engine of DeepSpeed that runs ZeRO ``stage``.

    Raises:
        RuntimeError: the ranks' fragments do not add up to the parameters: another version of DeepSpeed.
    """
    made: Partition = (Whole, Split, Split, Sharded)[stage](engine, trained)
    counts = torch.tensor([sum(f.stop - f.start for f in made.fragments)], dtype=torch.int64)
    if stage:
        dist.all_reduce(counts)
    expected = sum(item.numel for item in trained)
    if counts.item() != expected:
        raise RuntimeError(
            f"DeepSpeed's ranks hold {counts.item()} of {expected} trainable elements; this version of it is not "
            "supported, install that of constraints.txt"
        )
    order = {item.name: at for at, item in enumerate(trained)}
    made.fragments.sort(key=lambda fragment: order[fragment.name])
    return made
