"""Small jobs that train dual encoders."""

from __future__ import annotations

from typing import Any

from tests.support.vlm import vlm_job

from planaria.config import JobConfig


def dual_job(preset: str = "clip-tiny", **overrides: Any) -> JobConfig:
    """A job of five pairs per step in micro-batches of at most two; ``overrides`` as for :func:`vlm_job`."""
    scenes = {"data__scenes": {"caption_fraction": 1.0, "max_shapes": 2, "val_samples": 12}}
    return vlm_job(preset, **(scenes | {"contrastive__columns": 3} | overrides))
