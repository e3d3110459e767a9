"""One contender in a process of its own: ``python -m _data NAME PATTERN BATCH SECONDS``; prints one line of JSON."""

from __future__ import annotations

import contextlib
import json
import sys
import time

import psutil

from _data.contenders import CONTENDERS

WARM_UP = 4
"""Batches after which the clock of the steady state starts."""


def usage() -> tuple[float, float]:
    """CPU seconds and resident MiB (shared pages once per process that has them) of this process and its children."""
    me = psutil.Process()
    seconds, resident = 0.0, 0
    for process in [me, *me.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            seconds += times.user + times.system
            memory = process.memory_info()
            resident += memory.rss - getattr(memory, "shared", 0)
    return seconds, resident / 2**20


def measure(name: str, pattern: str, batch: int, seconds: float) -> dict[str, float]:
    """Rates of the steady state of one contender."""
    began = time.monotonic()
    stream = CONTENDERS[name](pattern, batch)
    with contextlib.closing(stream):
        next(stream)
        first = time.monotonic() - began
        for _ in range(WARM_UP):
            next(stream)
        start, (cpu, _), done, highest = time.monotonic(), usage(), 0, 0.0
        glance = start
        while (now := time.monotonic()) < start + seconds:
            next(stream)
            done += 1
            if now > glance + 1:
                glance, highest = now, max(highest, usage()[1])
        wall = time.monotonic() - start
        spent, resident = usage()
        return {
            "first_batch_s": first,
            "pairs_per_s": done * batch / wall,
            "pairs_per_cpu_s": done * batch / (spent - cpu),
            "mib": max(highest, resident),
        }


if __name__ == "__main__":
    contender, pattern, batch, seconds = sys.argv[1:]
    row = measure(contender, pattern, int(batch), float(seconds))
    print(json.dumps(row), flush=True)
