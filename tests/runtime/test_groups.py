"""Groups form, break and form again in living processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import RankPool
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from planaria.layout import Layout
from planaria.runtime.groups import ALWAYS, Groups, Interrupted, forget_generations, host_store
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


def test_the_store_listens_on_its_own_interface_only() -> None:
    before = socket_inodes()
    store = host_store("127.0.0.1")
    hosts = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(entry))) as held:
            if os.fstat(held.fileno()).st_ino not in before and held.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            ):
                hosts.add(held.getsockname()[0])
    assert hosts == {"127.0.0.1"}
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    client.set("key", "value")
    assert store.get("key") == b"value"


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


def _sharded_work(groups: Groups) -> tuple[int, int]:
    """Operations on sharded tensors, as FSDP2 makes them; returns (threads of any kind, descriptors)."""
    for axis in ALWAYS:
        part = DTensor.from_local(torch.ones(2), groups.mesh[axis], [Shard(0)])
        assert (part + part).sum().full_tensor() == 4 * groups.mesh[axis].size()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def test_layouts_that_come_and_go_leave_no_groups_behind() -> None:
    with RankPool(2) as pool:
        for layout in (Layout(dp_shard=2), Layout(dp_replicate=2), Layout(tp=2)):
            last = pool.run(layout, _sharded_work)
        pool.run(Layout(dp_shard=2), _sharded_work)
        first = pool.run(Layout(tp=2), _sharded_work)
        assert first == last
        for layout in (Layout(dp_shard=2), Layout(dp_replicate=2)):
            assert pool.run(layout, _sharded_work) == first, layout


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


def _form_up_to_the_ports(groups: Groups) -> None:
    """Rank 1 of two: all that forming does until it would say which ports it listens on; then it keeps silent."""
    r = groups.rendezvous
    client = dist.TCPStore(r.store_host, r.store_port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.PrefixStore(f"gen-{r.generation}", client), rank=r.rank, world_size=2)
    init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=ALWAYS)
    time.sleep(RETURN_LIMIT_S + 2.0)
    dist.destroy_process_group()


def _interrupted_after_the_mesh(groups: Groups) -> float:
    """Rank 0 of two, interrupted while it waits for the ports of rank 1; seconds until it is told."""
    adopt, at = groups._adopt_connections, []

    def interrupt() -> None:
        at.append(time.monotonic())
        groups.interrupt()

    def waiting(store: dist.Store) -> None:
        threading.Timer(0.5, interrupt).start()
        adopt(store)

    groups._adopt_connections = waiting  # type: ignore[method-assign]
    with pytest.raises(Interrupted):
        groups.form()
    return time.monotonic() - at[0]


def test_an_interrupt_between_the_mesh_and_the_ports_is_heard() -> None:
    with RankPool(2) as pool:
        pool.start(Layout(dp_shard=2), _interrupted_after_the_mesh, ranks=[0], form=False)
        pool.start(Layout(dp_shard=2), _form_up_to_the_ports, ranks=[1], form=False, again=True)
        (ok, seconds), (other, value) = pool.results([0, 1])
        assert ok, seconds
        assert other, value
        assert seconds < RETURN_LIMIT_S
        assert len(pool.run(Layout(dp_shard=2), _open_things)) == 2


@pytest.mark.parametrize("layout", [Layout(dp_shard=2), Layout(dp_replicate=2, dp_shard=1), Layout(tp=2)])
def test_every_axis_is_on_the_mesh(layout: Layout) -> None:
    with RankPool(2) as pool:
        assert pool.run(layout, _axis_sizes) == [(layout.dp_replicate, layout.dp_shard, layout.tp)] * 2


def _axis_sizes(groups: Groups) -> tuple[int, ...]:
    return tuple(groups.mesh.get_group(axis).size() for axis in ("dp_replicate", "dp_shard", "tp"))


def test_keys_of_old_generations_are_deleted_and_no_others() -> None:
    store = host_store("127.0.0.1")
    for generation in (1, 2, 10, 11):
        dist.PrefixStore(f"gen-{generation}", store).set("ports/0", "[]")
    store.set("gen-x/1", "")
    store.set("other", "")
    forget_generations(store, 10)
    assert sorted(store.list_keys()) == ["gen-10/ports/0", "gen-11/ports/0", "gen-x/1", "other"]
