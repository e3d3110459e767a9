"""The optimizer that DeepSpeed steps: torch's own, told once a step by how much to scale the gradients, or to rest.

ZeRO calls its optimizer once for each flat group of parameters. That all ranks skip a step whose numbers are not
finite, and by how much the gradient is clipped, is decided before, over all groups; the optimizer carries it out, so
nothing of DeepSpeed's own bookkeeping has to be imitated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from planaria.config import OptimConfig
from planaria.engine.optimizer import group_of


class _Scaled(torch.optim.Optimizer):
    """Mixed into an optimizer: :attr:`grad_factor` scales every gradient; None leaves everything as it is."""

    grad_factor: float | None = None

    def step(self, closure: Any = None) -> Any:
        if self.grad_factor is None:
            return None
        if self.grad_factor != 1.0:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(self.grad_factor)
        return super().step(closure)


class ScaledAdamW(_Scaled, torch.optim.AdamW):
    """AdamW (arXiv:1711.05101) on flat partitions."""


class ScaledSGD(_Scaled, torch.optim.SGD):
    """SGD with momentum on flat partitions."""


def optimizer_of(
    named: Iterable[tuple[str, tuple[int, ...], nn.Parameter]],
    config: OptimConfig,
    lr_scale: Callable[[str], float],
    *,
    fused: bool,
) -> tuple[ScaledAdamW | ScaledSGD, list[float]]:
    """The optimizer over trainable parameters, and the peak learning rate of each of its groups.

    Args:
        named: (name, shape, parameter); under ZeRO-3 a parameter does not know its shape.
        fused: whether AdamW is one vectorised pass, which pays on the CPU: where its state is offloaded.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, shape, parameter in named:
        groups.setdefault(group_of(name, shape, config, lr_scale), []).append(parameter)
    given = [{"params": members, "lr": lr, "weight_decay": decay} for (lr, decay), members in groups.items()]
    if config.name == "adamw":
        made: ScaledAdamW | ScaledSGD = ScaledAdamW(given, betas=config.betas, eps=config.eps, fused=fused)
    else:
        made = ScaledSGD(given, lr=config.lr, momentum=config.momentum)
    return made, [lr for lr, _ in groups]
