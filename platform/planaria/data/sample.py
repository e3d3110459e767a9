"""What a data set yields: one picture, or none, with a prompt and its answer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
"""RGB picture, uint8 [height, width, 3]."""


@dataclass(frozen=True, eq=False)
class Sample:
    """One image-text pair. Equality is identity, since arrays have no truth value."""

    key: str
    """Names the sample in logs: unique within its data set."""
    image: Pixels | None
    """uint8 [H, W, 3], or None for a text-only sample."""
    prompt: str
    answer: str
    choices: tuple[str, ...] = ()
    """All answers that the form of the question admits (chance level: 1 / len(choices)); empty for captions."""
