"""In which dtypes a model computes, and its gradients travel."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from planaria.config import TrainConfig

COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
"""Dtype of forward and backward passes by ``train.precision``; master weights: ``planaria.engine.initial.DTYPES``."""


def mixed_precision(train: TrainConfig) -> MixedPrecisionPolicy:
    """FSDP2's policy: half precision computes on copies that are cast as parameters are gathered.

    The sharded parameters stay float32 and so do their gradients, whatever they travelled in. Reductions are in float32
    unless asked for otherwise: a sum over many ranks in half precision loses the small addends.
    """
    half = train.precision in ("bf16", "fp16")
    reduce = COMPUTE[train.reduce_precision] if train.reduce_precision else torch.float32 if half else None
    return MixedPrecisionPolicy(param_dtype=COMPUTE[train.precision] if half else None, reduce_dtype=reduce)
