"""Groups form, break and form again in living processes."""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import RankPool

from planaria.layout import Layout
from planaria.runtime.groups import Groups, host_store
from planaria.runtime.sockets import socket_inodes

RETURN_LIMIT_S = 2.0


def _traffic(groups: Groups, interrupt_after_s: float, idle_rank: int, die: bool) -> float:
    """All-reduce until interrupted; ``idle_rank`` stays out (or dies), so that the others wait on a living rank.

    Returns seconds from the interrupt to the return of the collective.
    """
    rank = groups.rendezvous.rank
    dist.all_reduce(torch.ones(1000))
    if rank == idle_rank:
        if die:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(interrupt_after_s + 0.5)
        return 0.0
    at: list[float] = []

    def interrupt() -> None:
        at.append(time.monotonic())
        groups.interrupt()

    timer = threading.Timer(interrupt_after_s, interrupt)
    timer.start()
    try:
        while True:
            dist.all_reduce(torch.ones(100_000), group=groups.mesh.get_group("dp_shard"))
    except RuntimeError:
        ended = time.monotonic()
    timer.join()
    return max(0.0, ended - at[0])


def _open_things(groups: Groups) -> tuple[int, int, int]:
    dist.all_reduce(torch.ones(10))
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(socket_inodes())


def test_a_wait_on_a_living_rank_ends_when_interrupted() -> None:
    with RankPool(4) as pool:
        for idle in (0, 3):
            waits = pool.run(Layout(dp_shard=4), _traffic, 0.3, idle, False)
            assert max(waits) < RETURN_LIMIT_S


def test_survivors_of_a_killed_rank_form_the_next_generation() -> None:
    with RankPool(4) as pool:
        pool.run(Layout(dp_shard=2, tp=2), _open_things)
        pool.start(Layout(dp_shard=4), _traffic, 0.5, 3, True)
        for ok, wait in pool.results([0, 1, 2]):
            assert ok, wait
            assert wait < RETURN_LIMIT_S
        pool.processes[3].join(10)
        assert pool.processes[3].exitcode == -signal.SIGKILL
        assert len(pool.run(Layout(dp_shard=3), _open_things)) == 3


def test_many_generations_leave_nothing_open() -> None:
    with RankPool(3) as pool:
        layout = Layout(dp_shard=3)
        pool.run(layout, _traffic, 0.05, 1, False)
        before = pool.run(layout, _open_things)
        for generation in range(15):
            pool.run(layout, _traffic, 0.05, generation % 3, False)
        after = pool.run(layout, _open_things)
        assert after == before


def test_forming_with_an_absent_rank_ends_when_interrupted() -> None:
    with RankPool(3) as pool:
        layout = Layout(dp_shard=3)
        pool.interrupt_forming_after(0.5)
        pool.start(layout, _open_things, ranks=[0, 1])
        started = time.monotonic()
        for ok, value in pool.results([0, 1]):
            assert not ok
            assert value[0] == "Interrupted"
        assert time.monotonic() - started < 0.5 + RETURN_LIMIT_S
        pool.interrupt_forming_after(None)
        assert len(pool.run(layout, _open_things)) == 3


@pytest.mark.parametrize("layout", [Layout(dp_shard=2), Layout(dp_replicate=2, dp_shard=1), Layout(tp=2)])
def test_every_axis_is_on_the_mesh(layout: Layout) -> None:
    with RankPool(2) as pool:
        assert pool.run(layout, _axis_sizes) == [(layout.dp_replicate, layout.dp_shard, layout.tp)] * 2


def _axis_sizes(groups: Groups) -> tuple[int, ...]:
    return tuple(groups.mesh.get_group(axis).size() for axis in ("dp_replicate", "dp_shard", "tp"))


def test_the_store_listens_on_one_address_only() -> None:
    store = host_store("127.0.0.1")
    listening = {c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert [address.ip for address in listening if address.port == store.port] == ["127.0.0.1"]
