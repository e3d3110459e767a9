"""Element-wise optimizers on local shards.

FSDP2 shards, TP slices and whole parameters look alike here: plain local tensors. The optimizer never
meets a DTensor, its state inherits the box of its parameter, and a step costs no dispatch overhead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from planaria.config import OptimConfig
from planaria.engine.schedule import lr_factor
from planaria.engine.sharded import Shard

STATE_KEYS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


def state_keys(config: OptimConfig) -> tuple[str, ...]:
    """Names of the tensors that the optimizer keeps for every trainable parameter."""
    return () if config.name == "sgd" and not config.momentum else STATE_KEYS[config.name]


def group_of(
    name: str, shape: Sequence[int], config: OptimConfig, lr_scale: Callable[[str], float]
) -> tuple[float, float]:
    """(peak learning rate, weight decay) of the parameter ``name`` of global ``shape``.

    Norm weights and biases are not decayed: the custom of every published VLM recipe.
    """
    return config.lr * lr_scale(name), config.weight_decay if len(shape) > 1 else 0.0


class ShardedOptimizer:
    """AdamW or SGD over the trainable shards of this rank."""

    def __init__(
        self, shards: list[Shard], config: OptimConfig, total_steps: int, lr_scale: Callable[[str], float]
    ) -> None:
        self.config = config
        self.total_steps = total_steps
        self.shards = [shard for shard in shards if shard.parameter.requires_grad]
        self._views = [nn.Parameter(shard.local(), requires_grad=False) for shard in self.shards]
        merged: dict[tuple[float, float], list[nn.Parameter]] = {}
        for shard, view in zip(self.shards, self._views, strict=True):
            merged.setdefault(group_of(shard.name, shard.global_shape, config, lr_scale), []).append(view)
        if not merged:  # a pipeline stage of which nothing trains
            merged[(config.lr, 0.0)] = []
        groups = [{"params": views, "lr": lr, "weight_decay": decay} for (lr, decay), views in merged.items()]
        self._peak = [lr for lr, _ in merged]
        self.updates = 0
        """Updates applied so far: fewer than the steps done where a step was skipped. Sets Adam's bias correction."""
        if config.name == "adamw":
            self.torch: torch.optim.Optimizer = torch.optim.AdamW(
                groups, betas=config.betas, eps=config.eps, foreach=True
            )
        else:
            self.torch = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, foreach=True)

    def step(self, step: int, grad_scale: float) -> float:
        """Apply the gradients times ``grad_scale`` at 0-based ``step``; returns the peak group's learning rate."""
        factor = lr_factor(step, self.total_steps, self.config.schedule)
        for group, peak in zip(self.torch.param_groups, self._peak, strict=True):
            group["lr"] = peak * factor
        for shard, view in zip(self.shards, self._views, strict=True):
            # FSDP2 may move a shard's storage (padding at first use), so the view is renewed.
            view.data = shard.local()
            grad = shard.grad()
            # A parameter that no sample reached has gradient zero on every layout, never "no gradient":
            # moments and decay must not depend on which rank saw which sample.
            view.grad = torch.zeros_like(view) if grad is None else grad
        if grad_scale != 1.0:
            torch._foreach_mul_([view.grad for view in self._views if view.grad is not None], grad_scale)
        self.torch.step()
        self.updates += 1
        for view in self._views:
            view.grad = None
        return self.config.lr * factor

    def state(self) -> Iterator[tuple[str, Shard, Tensor]]:
        """(state name, shard, local tensor) of every state tensor, zeros where none exists yet."""
        for shard, view in zip(self.shards, self._views, strict=True):
            held = self.torch.state.get(view, {})
            for key in self.keys:
                value = held.get(key)
                yield key, shard, torch.zeros_like(view) if value is None else value

    def load(self, read: Callable[[str, Shard], Tensor], updates: int) -> None:
        """Replace the state by ``read(state name, shard)`` after so many ``updates``."""
        self.updates = updates
        for shard, view in zip(self.shards, self._views, strict=True):
            view.data = shard.local()
            held: dict[str, object] = {key: read(key, shard).to(view) for key in self.keys}
            if self.config.name == "adamw":
                held["step"] = torch.tensor(float(updates))
            if held:
                self.torch.state[view] = held

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of what is kept of every trained parameter."""
        return state_keys(self.config)
