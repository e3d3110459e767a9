"""The two halves of a backward pass: gradients of inputs at once, gradients of weights when there is time.

Nearly all of a transformer's weights are those of linear layers, and the gradient of such a weight is one product of
two tensors that are known once the gradient of the output is. So linear layers postpone this product, and everything
else (norms, biases, embeddings) is differentiated as ever: no graph is taken apart, and no parameter can be missed.
After the weight-gradient store of zero-bubble pipelines (Qi et al., arXiv:2401.10241).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd import Function

from planaria.engine.tensor_parallel import RowLinear


class Postponed:
    """Weight gradients that wait."""

    def __init__(self) -> None:
        self._work: list[Callable[[], None]] | None = None

    def collect(self) -> None:
        """From now on gradients wait, until :meth:`take`."""
        self._work = []

    def take(self) -> list[Callable[[], None]]:
        """What to call for the gradients collected since."""
        work, self._work = self._work, None
        assert work is not None
        return work

    def add(self, work: Callable[[], None]) -> bool:
        """Postpone ``work``, which adds to the gradients of weights; False if nothing is being collected."""
        if self._work is None:
            return False
        self._work.append(work)
        return True


@runtime_checkable
class Postponing(Protocol):
    """A module with an autograd function of its own that can postpone the gradients of its weights."""

    def postpone_to(self, later: Postponed) -> None:
        """In backward passes, hand to ``later.add`` what can wait, and do it at once where that says False."""
        ...


def _product(x: Tensor, grad: Tensor) -> Tensor:
    return grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


@torch.no_grad()
def _accumulate(weight: Tensor, x: Tensor, grad: Tensor) -> None:
    product = _product(x, grad)
    weight.grad = product if weight.grad is None else weight.grad.add_(product)


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, later: Postponed) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.later, ctx.biased = later, bias is not None
        # The very object whose .grad is the parameter's: what backward() gets back may be another one.
        ctx.parameter = weight
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        to_x = grad @ weight if ctx.needs_input_grad[0] else None
        to_weight = None
        if ctx.needs_input_grad[1] and not ctx.later.add(partial(_accumulate, ctx.parameter, x, grad)):
            to_weight = _product(x, grad)
        to_bias = None
        if ctx.biased and ctx.needs_input_grad[2]:
            to_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
        return to_x, to_weight, to_bias, None


def postpone_weights(model: nn.Module, later: Postponed) -> None:
    """Let the linear layers of ``model`` postpone their weights' gradients whenever ``later`` collects.

    After tensor parallelism. Modules keep class, name and hooks; only the product that they compute is replaced.
    """

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        # Only leaves have a .grad to add to; what is computed from parameters takes the ordinary way.
        if torch.is_grad_enabled() and isinstance(weight, nn.Parameter) and weight.requires_grad:
            out: Tensor = _Linear.apply(x, weight, bias, later)
            return out
        return nn.functional.linear(x, weight, bias)

    def forward(module: nn.Linear, input: Tensor) -> Tensor:
        return product(input, module.weight, module.bias)

    for module in model.modules():
        if isinstance(module, Postponing):
            module.postpone_to(later)
        elif isinstance(module, RowLinear):
            module.product = product
        elif isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
            module.forward = partial(forward, module)  # type: ignore[method-assign]
