"""What a rank needs itself: who waits is not slow, who computes more is."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from tests.support.ranks import RankPool
from tests.support.toy import ToyRecipe
from tests.support.vlm import engine_of, step
from torch import Tensor, nn

from planaria.config import parse
from planaria.engine import compute_time
from planaria.engine.compute_time import ThreadClock, compute_clock
from planaria.layout import Layout
from planaria.runtime.groups import Groups

JOB = parse({"train": {"steps": 9, "global_batch": 4, "micro_batch": 1}})
MORE_S = 0.4


@dataclass
class Uneven(ToyRecipe):
    """This rank sleeps, or computes, for a while in every forward pass."""

    asleep_s: float = 0.0
    busy_s: float = 0.0

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        time.sleep(self.asleep_s)
        until = time.thread_time() + self.busy_s
        while time.thread_time() < until:
            torch.ones(100, 100).sum()
        return super().loss(model, batch)


def _steps(groups: Groups, asleep: int, busy: int) -> tuple[float, float]:
    """(compute_s, wall time) of the second step of this rank."""
    rank = groups.rendezvous.rank
    recipe = Uneven(asleep_s=MORE_S if rank == asleep else 0.0, busy_s=MORE_S if rank == busy else 0.0)
    engine = engine_of(groups, recipe, JOB)
    step(engine)
    began = time.monotonic()
    compute_s = step(engine).compute_s
    return compute_s, time.monotonic() - began


@pytest.mark.parametrize("layout", [Layout(dp_shard=3), Layout(dp_replicate=3)], ids=str)
def test_waiting_is_left_out_and_work_is_not(pool: RankPool, layout: Layout) -> None:
    answers = pool.run(layout, _steps, 1, 2)
    more = 2 * MORE_S  # of two micro-batches
    # All ranks take as long as the two slow ones, so wall time tells nothing.
    assert all(wall > more for _, wall in answers)
    waiting, asleep, busy = (compute_s for compute_s, _ in answers)
    assert busy > more
    assert waiting < busy / 2
    assert asleep < busy / 2


def test_on_a_cpu_the_thread_is_measured() -> None:
    clock = compute_clock(torch.device("cpu"), "fp32")
    assert isinstance(clock, ThreadClock)
    clock.start()
    time.sleep(0.2)
    idle = clock.stop()
    clock.start()
    until = time.thread_time() + 0.1
    while time.thread_time() < until:
        pass
    assert clock.stop() >= 0.1 > idle


class Event:
    """Stands for a CUDA event: done once the host has waited for the device."""

    done = False

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return Event.done

    def elapsed_time(self, end: Event) -> float:
        return 2.0


def test_the_probe_of_a_device_runs_now_and_then_and_is_never_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arithmetic around it; the work itself needs a device."""
    products: list[torch.dtype] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(compute_time, "PROBE_SIZE", 2)
    monkeypatch.setattr(compute_time, "PROBE_EVERY", 3)
    monkeypatch.setattr(torch, "mm", lambda a, b, out: products.append(a.dtype))
    clock = compute_time.CudaProbe(torch.device("cpu"), torch.bfloat16)
    found, probed = [], []
    for done in (False, True, True, True, True):
        Event.done = done
        clock.start()
        found.append(clock.stop())
        probed.append(len(products))
    once = 1 + compute_time.PROBE_PRODUCTS
    assert found == [None, 0.002, 0.002, 0.002, 0.002]
    assert probed == [once, once, once, 2 * once, 2 * once]
    assert set(products) == {torch.bfloat16}
