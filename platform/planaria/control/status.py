"""What the live view and the summary show of a job: plain values, kept up to date by the controller."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from planaria.control.generation import Generation

WINDOW = 20
"""Steps over which rates are averaged."""
LOSSES = 160
"""Losses that are kept for whoever looks on."""


@dataclass
class Status:
    """A snapshot that is updated in place."""

    total_steps: int
    state: str = "waiting"
    step: int = 0
    loss: float | None = None
    generation: int = 0
    layout: str = ""
    workers: int = 0
    ready: int = 0
    checkpoint_step: int | None = None
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes of shared memory in use, by node."""
    energy: dict[str, dict[str, float]] = field(default_factory=dict)
    """Joules since its keeper began, by meter, of nodes that have meters."""
    nodes: list[dict[str, Any]] = field(default_factory=list)
    """Nodes in quarantine or with something against them, see :meth:`planaria.control.nodes.NodeTrust.listing`."""
    bad_samples: int = 0
    last_event: str = ""
    generations: list[dict[str, Any]] = field(default_factory=list)
    goodput: dict[str, float] = field(default_factory=dict)
    """The account of wall time, see :meth:`planaria.observe.goodput.Account.view`."""
    last: dict[str, Any] = field(default_factory=dict)
    _tokens: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _losses: deque[float] = field(default_factory=lambda: deque(maxlen=LOSSES))
    _times: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def note(self, message: dict[str, Any], generation: Generation) -> None:
        """Rank 0 finished a step."""
        self.step, self.loss = message["step"] + 1, message["loss"]
        self.generation, self.layout = generation.number, str(generation.plan.layout)
        self._times.append(message["step_s"])
        if message["loss"] is not None:
            self._losses.append(message["loss"])
        keep = ("step", "loss", "grad_norm", "lr", "targets", "data_wait_s", "step_s")
        self.last = {key: message[key] for key in keep} | {"generation": generation.number, "layout": self.layout}

    def note_tokens(self, tokens: int, seconds: float) -> None:
        """All ranks together consumed ``tokens`` in a step of ``seconds``."""
        self._tokens.append((seconds, tokens))

    @property
    def losses(self) -> list[float]:
        """The losses of the last steps, oldest first."""
        return list(self._losses)

    @property
    def tokens_per_s(self) -> float:
        """Weighted input tokens per second of stepping, over the last steps."""
        seconds = sum(s for s, _ in self._tokens)
        return sum(t for _, t in self._tokens) / seconds if seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, with the rates."""
        plain = {key: value for key, value in self.__dict__.items() if not key.startswith("_")}
        step_s = sum(self._times) / len(self._times) if self._times else 0.0
        return plain | {"tokens_per_s": self.tokens_per_s, "step_s": step_s, "time": time.time()}


def generation_row(generation: Generation) -> dict[str, Any]:
    """One row of the generation table."""
    return {
        "generation": generation.number,
        "layout": str(generation.plan.layout),
        "workers": len(generation.members),
        "spares": len(generation.plan.spares),
        "cause": generation.cause,
        "from_step": generation.start_step,
        "to_step": generation.step,
        "recovery_s": generation.recovery_s,
        "phases": dict(generation.phases),
    }
