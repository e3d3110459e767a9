"""Global tensors put together from the boxes of all ranks, and how far they are from those of one process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from planaria.engine.protocol import Engine, HasGradients
from planaria.state.boxes import Box, uncovered

Held = list[tuple[str, tuple[int, ...], Box, Tensor | None]]
"""(name, global shape, box, value) of what one rank holds; no value where there is no gradient."""

FLOOR = 1e-12
"""What is smaller than this everywhere is mathematically zero, and only that is asked of it."""


def held(engine: Engine, *, gradients: bool) -> Held:
    """Copies of this rank's parameters, or of its gradients while a step polls.

    Raises:
        TypeError: the engine does not show its gradients.
    """
    if not gradients:
        prefix = "model/"
        return [
            (part.tensor.removeprefix(prefix), part.global_shape, part.box, part.value.detach().clone())
            for part in engine.state()
            if part.tensor.startswith(prefix)
        ]
    if not isinstance(engine, HasGradients):
        raise TypeError(f"{type(engine).__name__} does not show its gradients")
    return [
        (name, shape, box, None if value is None else value.detach().clone())
        for name, shape, box, value in engine.gradients()
    ]


def assemble(ranks: Iterable[Held]) -> dict[str, Tensor]:
    """Global tensors of all ranks' boxes.

    Raises:
        AssertionError: a value is missing, a tensor is not covered, or replicas differ.
    """
    whole: dict[str, Tensor] = {}
    boxes: dict[str, list[Box]] = {}
    for name, shape, box, value in (entry for rank in ranks for entry in rank):
        if value is None:
            assert box.empty, f"no value for {name}{box}"
            continue
        target = whole.setdefault(name, torch.full(shape, math.nan, dtype=value.dtype))
        part = target[box.relative_to(Box.whole(shape))]
        known = ~part.isnan()
        torch.testing.assert_close(value[known], part[known], rtol=1e-9, atol=1e-13, msg=f"replicas of {name}{box}")
        part.copy_(value)
        boxes.setdefault(name, []).append(box)
    for name, tensor in whole.items():
        assert not uncovered(Box.whole(tensor.shape), boxes[name]), f"{name} is not covered"
    return whole


def relative_errors(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], floor: float = FLOOR
) -> dict[str, float]:
    """Largest difference of each tensor over its largest value; where that is under ``floor``, an absolute one
    is measured against ``floor`` (gradients that are mathematically zero).

    Raises:
        AssertionError: not the same tensors.
    """
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    errors = {}
    for name, reference in expected.items():
        size = reference.abs().max().item()
        difference = (found[name] - reference).abs().max().item()
        errors[name] = difference / size if size > floor else (0.0 if difference < floor else math.inf)
    return errors
