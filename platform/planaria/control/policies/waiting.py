"""Whether enough workers are there to form a generation."""

from __future__ import annotations

from dataclasses import dataclass

from planaria.config import ElasticConfig
from planaria.control.policies.decisions import GiveUp


@dataclass(frozen=True)
class Start:
    """Form a generation of at most ``workers`` workers."""

    workers: int


@dataclass(frozen=True)
class Wait:
    """Not yet; ask again when a worker joins or after ``seconds``."""

    seconds: float


def wait(
    ready: int,
    waited_s: float,
    config: ElasticConfig,
    settle_s: float = 0.0,
    quiet_s: float = 0.0,
    data: bool = True,
) -> Start | Wait | GiveUp:
    """Whether to form a generation from the workers that are there.

    With ``min_workers`` but not ``max_workers`` there, it waits until none has joined for ``settle_s`` seconds,
    so that a starting cluster does not form one generation per node. It waits for ``wait_s`` at the most.

    Args:
        ready: workers that could take a rank.
        waited_s: seconds since waiting began.
        config: limits.
        settle_s: quiet time to wait for before starting below ``max_workers``.
        quiet_s: seconds since the last worker joined.
        data: whether a loader has opened the data; later, ranks can do without loaders.
    """
    left = config.wait_s - waited_s
    if ready >= config.min_workers and not data:
        if left > 0:
            return Wait(left)
        return GiveUp(
            f"no data loader came up within elastic.wait_s={config.wait_s:g} s; a loader needs "
            f"data.loader_cpus CPUs that no worker holds: lower data.loader_cpus, or add a node"
        )
    if ready >= config.max_workers:
        return Start(config.max_workers)
    if ready >= config.min_workers:
        unsettled = min(settle_s - quiet_s, left)
        return Wait(unsettled) if unsettled > 0 else Start(ready)
    if left > 0:
        return Wait(left)
    return GiveUp(
        f"only {ready} of the elastic.min_workers={config.min_workers} workers came within "
        f"elastic.wait_s={config.wait_s:g} s; add nodes, or lower elastic.min_workers"
    )
