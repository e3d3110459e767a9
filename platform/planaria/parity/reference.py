"""The undisturbed mathematics: the unmodified model, trained by plain torch in one process."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from planaria.config import JobConfig
from planaria.engine.batches import to_device
from planaria.engine.initial import DTYPES, first_state
from planaria.parity.steps import batches
from planaria.recipe import Recipe, StateReader
from planaria.state.boxes import Box


class Reference:
    """The model as Hugging Face (or its author) wrote it, on the whole global batch at once.

    Args:
        state: where the weights come from; by default the state before the first step.
    """

    def __init__(self, recipe: Recipe, job: JobConfig, state: StateReader | None = None) -> None:
        self.recipe, self.job = recipe, job
        self.model: nn.Module = recipe.build_model().to(DTYPES[job.train.precision])
        state = first_state(recipe, job) if state is None else state
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(state.read(f"model/{name}", Box.whole(parameter.shape)))
        self.step_done = 0

    def backward(self) -> float:
        """Gradients of the mean target loss over the whole global batch; returns that loss."""
        self.model.zero_grad()
        train = self.job.train.model_copy(update={"micro_batch": self.job.train.global_batch})
        whole = batches(self.recipe, self.job.model_copy(update={"train": train}), self.step_done, 0, 1)
        assert len(whole) == 1
        targets = sum(batch.targets for batch in whole)
        total = 0.0
        for batch in whole:
            tensors = to_device(batch, torch.device("cpu"), DTYPES[self.job.train.precision])
            loss = self.recipe.loss(self.model, tensors) / targets
            loss.backward()
            total += loss.item()
        return total

    def gradients(self) -> dict[str, Tensor]:
        """Copies, by name; zero where no sample reaches a parameter."""
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in self.model.named_parameters()
            if p.requires_grad
        }

    def parameters(self) -> dict[str, Tensor]:
        """Copies, by name."""
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def optimizer(self) -> torch.optim.Optimizer:
        """Plain torch, with the decay that the configuration promises."""
        optim = self.job.optim
        trained = [p for p in self.model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": optim.weight_decay},
            {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
        ]
        if optim.name == "adamw":
            return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps)
        return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum)
