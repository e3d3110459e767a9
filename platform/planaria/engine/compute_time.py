"""How long a rank itself needs, waiting for others left out: what tells a slow machine from those that wait for it.

Wall time cannot: in a step all ranks take as long as the slowest. The numbers of the ranks of one step compare with
one another; they are not parts of the step's wall time.

* **On CPUs**: processor time of the training thread from the first micro-batch to the end of the update. Autograd runs
  backward passes of CPU tensors in the thread that calls it; gloo sleeps while it waits, and adds up in threads of its
  own. It depends on the data of the step, so a rank should be judged by several steps. A thread that is kept from its
  core by other processes uses no processor time: such a rank is slow, and is not seen here.
* **On CUDA** the kernels of the model wait for collectives on the device, where neither a host clock nor events around
  them can tell waiting from work. So the device is given, every :data:`PROBE_EVERY` steps, a fixed piece of work that
  has no collective inside: some matrix products between two events, at the start of a step, when nothing else is
  queued. Clocks that are throttled, a device that is shared or broken show there, whatever the data of the step. In
  between, the last measurement stands.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch

from planaria.engine.precision import COMPUTE

PROBE_EVERY = 20
PROBE_SIZE = 3072
"""Rows and columns of the probe's matrices: one product takes long beside the 10 us of a launch."""
PROBE_PRODUCTS = 8


class ComputeClock(Protocol):
    """Started and stopped once a step, in the training thread."""

    def start(self) -> None:
        """The step begins: its batch is here, and nothing of it is done yet."""
        ...

    def stop(self) -> float | None:
        """Seconds; None if there is no measurement yet."""
        ...


class ThreadClock:
    """Processor time of the calling thread."""

    def __init__(self) -> None:
        self._began = 0.0

    def start(self) -> None:
        self._began = time.thread_time()

    def stop(self) -> float:
        return time.thread_time() - self._began


class CudaProbe:
    """Time of a fixed piece of work on the device, now and then."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._steps = 0
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._seconds: float | None = None

    def start(self) -> None:
        if self._steps % PROBE_EVERY == 0:
            self._probe()
        self._steps += 1

    def stop(self) -> float | None:
        # The step has read its loss from the device since, so this asks for what is there; it never waits.
        if self._events is not None and self._events[1].query():
            self._seconds = self._events[0].elapsed_time(self._events[1]) / 1e3
            self._events = None
        return self._seconds

    def _probe(self) -> None:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # Taken anew each time, so that no memory is held while activations need it.
        a = torch.full((PROBE_SIZE, PROBE_SIZE), 0.5, dtype=self._dtype, device=self._device)
        b = torch.empty_like(a)
        # Not timed: it wakes the clocks, loads the kernel, and keeps the device busy while the host queues the rest,
        # so that no gap between launches is measured.
        torch.mm(a, a, out=b)
        begin.record()
        for _ in range(PROBE_PRODUCTS):
            torch.mm(a, a, out=b)
        end.record()
        self._events = begin, end


def compute_clock(device: torch.device, precision: str) -> ComputeClock:
    """The clock for a device; ``precision`` as in ``train.precision``."""
    if device.type != "cuda":
        return ThreadClock()
    # What a consumer card does of float64 says nothing of a model, but then such a model is what it trains.
    return CudaProbe(device, COMPUTE[precision])
