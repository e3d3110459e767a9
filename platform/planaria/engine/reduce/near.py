"""Ranks of one tensor-parallel group take over one result for what they hold alike."""

from __future__ import annotations

import torch
import torch.distributed as dist

from planaria.engine.reduce.protocol import Setting, gradient


def agree_near(setting: Setting) -> None:
    """Send the gradients of parameters that tensor-parallel ranks hold whole from the first of them to the others.

    Each compressed its own, and these may differ in the last bit, which a rounding to few levels may make a whole
    level of. The links are near, and such parameters are few.
    """
    layout = setting.layout
    if layout.tp == 1 or layout.dp_replicate == 1:
        return
    grads = [gradient(shard) for shard in setting.shards if "tp" in shard.axes and shard.box.numel]
    if not grads:
        return
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    first = layout.rank(**(layout.coords(setting.mesh.get_rank()) | {"tp": 0}))
    dist.broadcast(flat, src=first, group=setting.mesh.get_group("tp"))
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))
