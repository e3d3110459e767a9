"""Dynamic loss scaling for half precision (Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740). Pure.

float16 holds nothing below 6e-8, where many gradients lie, so the loss is multiplied by a scale before the backward
pass and the gradients are divided by it after. The scale is searched: after an overflow it shrinks, and after
enough good steps it grows. It is a power of two at all times, so that scaling back changes no gradient's digits.
"""

from __future__ import annotations

from dataclasses import dataclass

from planaria.config import LossScaleConfig

LEAST, GREATEST = 1.0, 2.0**30
"""A gradient that is not finite without any magnification is no overflow of the scale; and float32 sums of scaled
gradients must stay far from their own limit."""


@dataclass(frozen=True)
class LossScale:
    """The scale, and how long it has been good: all that the search has to remember."""

    scale: float = 1.0
    good_steps: int = 0
    """Steps without an overflow since the scale last changed."""

    def to_blame(self, *, loss_finite: bool, gradient_finite: bool) -> bool:
        """Whether a gradient that is not finite tells of too large a scale, and not of a fault.

        The loss is computed unscaled: where it is not finite itself, no scale would help. Nor is anything left to
        search at the least scale.
        """
        return loss_finite and not gradient_finite and self.scale > LEAST

    def after(self, config: LossScaleConfig, *, overflow: bool) -> LossScale:
        """The scale of the next step, after one whose gradient did (not) overflow."""
        if overflow:
            return LossScale(max(LEAST, self.scale * config.backoff))
        if self.good_steps + 1 < config.interval:
            return LossScale(self.scale, self.good_steps + 1)
        return LossScale(min(GREATEST, self.scale * config.growth))
