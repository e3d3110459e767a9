"""Forward and backward over the micro-batches of one step, through a model that lies over several pipeline ranks.

Micro-batches come cut as the loaders made them, each of its own form. What each rank does, and in which order, is a
list of :mod:`planaria.planner.schedules`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fully_shard import FSDPState

from planaria.engine.mail import Mail
from planaria.engine.passes import At
from planaria.engine.split_backward import Postponed, postpone_weights
from planaria.engine.staged_model import StagedModel
from planaria.planner.schedules import Action, Kind, orders
from planaria.recipe import Recipe, ScoredRecipe

Batch = Mapping[str, Tensor]


@dataclass
class _Alive:
    """What a stage keeps of a micro-batch between its passes."""

    hidden: Tensor | None
    out: Tensor


class PipelinedPasses:
    """Implements :class:`planaria.engine.passes.Passes` on one pipeline rank.

    Args:
        staged: this rank's stages.
        schedule: one of :data:`planaria.planner.schedules.SCHEDULES`.
        group: the ranks of this pipeline.
        counts_loss: whether this rank's loss counts, if it has the last stage.
    """

    def __init__(
        self,
        recipe: Recipe,
        staged: StagedModel,
        schedule: str,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        counts_loss: bool,
    ) -> None:
        self._recipe, self._staged, self._schedule, self._group = recipe, staged, schedule, group
        self._device, self._counts_loss = device, counts_loss
        self._cut = staged.cut
        self._mail = Mail(group, device)
        self._later = Postponed()
        if schedule == "zero_bubble":
            postpone_weights(staged.model, self._later)

    def run(self, batches: Sequence[Batch], scale: float, at: At) -> Tensor:
        """See :meth:`planaria.engine.passes.Passes.run`; the loss is known to the last stage alone."""
        cut = self._cut
        order = orders(self._schedule, cut.pp, cut.stages // cut.pp, len(batches))[cut.rank]
        _postpone_reduction(self._staged.model)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        alive: dict[tuple[int, int], _Alive] = {}
        weights: dict[tuple[int, int], list[Callable[[], None]]] = {}
        for done, action in enumerate(order):
            place = action.stage, action.micro
            # While it waits for a neighbour a rank is further than one that works: see runtime/progress.py.
            at("reduce", done)
            if action.kind is Kind.FORWARD:
                batch = batches[action.micro]
                hidden = self._take_hidden(action, batch)
                at("step", done)
                out, loss = self._forward(action, hidden, batch, scale)
                if loss is not None:
                    total += loss
                alive[place] = _Alive(hidden, out)
            elif action.kind is Kind.WEIGHT:
                at("step", done)
                for work in weights.pop(place):
                    work()
            else:
                kept = alive.pop(place)
                grad = self._take_gradient(action, kept.out)
                at("step", done)
                if action.kind is Kind.INPUT:
                    weights[place] = self._backward_of_input(kept.out, grad)
                else:
                    _backward(kept.out, grad)
                self._give_gradient(action, kept.hidden)
        self._mail.flush()
        at("reduce", len(order))
        _reduce(self._staged.model)
        self._add_twins()
        return total if self._counts_loss else torch.zeros_like(total)

    def score(self, recipe: ScoredRecipe, batch: Batch) -> Tensor:
        """Scores [B] of one batch, known to all ranks of the pipeline."""
        scores: Tensor | None = None
        for stage in self._cut.own:
            action = Action(Kind.FORWARD, stage, 0)
            hidden = self._take_hidden(action, batch)
            out = self._staged.run(stage, hidden, lambda model: recipe.score(model, batch))
            if stage == self._cut.stages - 1:
                scores = out
            else:
                self._give_hidden(action, out, batch)
        self._mail.flush()
        rows = torch.tensor([0 if scores is None else len(scores)], device=self._device)
        dist.broadcast(rows, group=self._group, group_src=self._cut.pp - 1)
        known = torch.zeros(int(rows), dtype=torch.float64, device=self._device) if scores is None else scores.double()
        dist.broadcast(known, group=self._group, group_src=self._cut.pp - 1)
        return known

    def _forward(
        self, action: Action, hidden: Tensor | None, batch: Batch, scale: float
    ) -> tuple[Tensor, Tensor | None]:
        """The stage's output, or the scaled loss; and the loss sum where it is known."""

        def loss(model: nn.Module) -> Tensor:
            return self._recipe.loss(model, batch)

        out = self._staged.run(action.stage, hidden, loss)
        if action.stage == self._cut.stages - 1:
            return out * scale, out.detach().double()
        self._give_hidden(action, out, batch)
        return out, None

    def _backward_of_input(self, out: Tensor, grad: Tensor | None) -> list[Callable[[], None]]:
        """What is left to do for the gradients of weights."""
        self._later.collect()
        _backward(out, grad)
        return self._later.take()

    # -- messages --------------------------------------------------------------------------------

    def _tag(self, stage: int, micro: int, *, gradient: bool) -> int:
        """Of the message between ``stage`` and the one after it."""
        return 2 * (micro * self._cut.stages + stage) + gradient

    def _take_hidden(self, action: Action, batch: Batch) -> Tensor | None:
        if action.stage == 0:
            return None
        before = action.stage - 1
        key = _key(before, batch)
        value, wanted = self._mail.hear(key, before % self._cut.pp, self._tag(before, action.micro, gradient=False))
        return value.requires_grad_(wanted)

    def _give_hidden(self, action: Action, out: Tensor, batch: Batch) -> None:
        to = (action.stage + 1) % self._cut.pp
        self._mail.announce(out, _key(action.stage, batch), to, self._tag(action.stage, action.micro, gradient=False))

    def _take_gradient(self, action: Action, out: Tensor) -> Tensor | None:
        if action.stage == self._cut.stages - 1 or not out.requires_grad:
            return None
        source = (action.stage + 1) % self._cut.pp
        tag = self._tag(action.stage, action.micro, gradient=True)
        return self._mail.receive(tuple(out.shape), out.dtype, source, tag)

    def _give_gradient(self, action: Action, hidden: Tensor | None) -> None:
        if hidden is None or not hidden.requires_grad:
            return
        grad = torch.zeros_like(hidden) if hidden.grad is None else hidden.grad
        before = action.stage - 1
        self._mail.send(grad, before % self._cut.pp, self._tag(before, action.micro, gradient=True))
        hidden.grad = None

    def _add_twins(self) -> None:
        """Add up the gradients of what the first and the last rank both hold (tied embeddings)."""
        cut = self._cut
        if cut.rank not in (0, cut.pp - 1):
            return
        other = cut.pp - 1 - cut.rank
        for index, twin in enumerate(cut.twins):
            parameter = self._staged.model.get_parameter(twin.first if cut.rank == 0 else twin.last)
            if not parameter.requires_grad:
                continue
            own = self._staged.local(parameter)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grad = self._staged.local(parameter.grad)
            self._mail.send(grad.clone(), other, index)
            theirs = self._mail.receive(tuple(own.shape), grad.dtype, other, index)
            grad.add_(theirs)  # the same sum on both sides, to the bit: addition commutes
        self._mail.flush()


def _backward(out: Tensor, grad: Tensor | None) -> None:
    if out.requires_grad:
        out.backward(grad)


def _key(stage: int, batch: Batch) -> tuple[object, ...]:
    return stage, torch.is_grad_enabled(), *((name, tuple(value.shape)) for name, value in batch.items())


def _postpone_reduction(model: nn.Module) -> None:
    """Gradients of a stage are kept whole until its last micro-batch, then reduced once."""
    assert isinstance(model, FSDPModule)
    model.set_is_last_backward(False)
    model.set_requires_gradient_sync(False)


def _reduce(model: nn.Module) -> None:
    """Reduce the gradients of all micro-batches, as FSDP2 would have at the end of the last backward pass."""
    assert isinstance(model, FSDPModule)
    model.set_is_last_backward(True)
    model.set_requires_gradient_sync(True)
    state = model._get_fsdp_state()
    assert isinstance(state, FSDPState)
    for inner in reversed(state._state_ctx.all_states):
        for group in reversed(inner._fsdp_param_groups):
            group.post_backward()
    state._root_post_backward_final_callback()
