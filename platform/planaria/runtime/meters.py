"""What a rank measures of itself beside its training: time by phase, memory, batches that wait, bytes sent."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil
import torch

from planaria.engine.protocol import CountsBytes, Engine
from planaria.engine.reduce.protocol import FAR

EVERY_S = 1.0
"""What costs a system call or more is looked at this often, and not every step."""

Costly = Callable[[], dict[str, float]]


class Meters:
    """Adds its readings to the report of every step.

    Args:
        at: told (step, phase, micro-batch) where this rank is, before anything else.
        costly: readings that are taken once in :data:`EVERY_S`, by their names in the report.
        sent: bytes that this rank has sent so far.
    """

    def __init__(
        self, at: Callable[[int, str, int], None], costly: Costly = dict, sent: Callable[[], int] = lambda: 0
    ) -> None:
        self._tell, self._costly, self._sent = at, costly, sent
        self._laps: dict[str, float] = {}
        self._phase: str | None = None
        self._since = 0.0
        self._looked_at = float("-inf")
        self._before = 0

    def at(self, step: int, phase: str, micro: int = 0) -> None:
        """This rank has come so far."""
        self._tell(step, phase, micro)
        now = time.monotonic()
        if phase == "data":  # a step begins; what lay between it and the last one is no part of either
            self._laps = {}
        else:
            self._lap(now)
        self._phase, self._since = phase, now

    def take(self) -> dict[str, Any]:
        """Readings for the report of the step that is over: ``phase_s``, seconds by phase; ``wire_bytes``, sent
        since the last report; now and then what is costly."""
        now = time.monotonic()
        self._lap(now)
        self._phase = None
        sent = self._sent()
        told: dict[str, Any] = {
            "phase_s": {phase: round(seconds, 6) for phase, seconds in self._laps.items()},
            "wire_bytes": sent - self._before,
        }
        self._before = sent
        if now - self._looked_at >= EVERY_S:
            self._looked_at = now
            told |= self._costly()
        return told

    def _lap(self, now: float) -> None:
        if self._phase is not None:
            self._laps[self._phase] = self._laps.get(self._phase, 0.0) + now - self._since


def usage(device: torch.device) -> dict[str, float]:
    """Memory of this process, in bytes."""
    told = {"rss_bytes": float(psutil.Process().memory_info().rss)}
    if device.type == "cuda":
        told["device_bytes"] = float(torch.cuda.memory_allocated(device))
    return told


def bytes_sent(engine: Engine) -> int:
    """Bytes that ``engine`` has sent for sums of gradients, if it counts them."""
    return engine.wire.sent(FAR) if isinstance(engine, CountsBytes) else 0
