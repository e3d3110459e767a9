"""Copies on other nodes: partners that fail, come back, hang, or lack memory; and a ring that changes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.support.memory import Case, Nodes, Ranks, Spec, until

from planaria.layout import Layout
from planaria.memory import courier, keeper, shelf
from planaria.memory.buffers import MemoryTooSmall
from planaria.memory.client import announce_ring, forget, newest_in_memory
from planaria.memory.shelf import Stack
from planaria.memory.wire import KeeperAddress, KeeperError

CASE = Case((Spec("a", (64, 16)), Spec("b", (5,))), Layout(), ("n0",), ("n0", "n1"))
"""One rank on n0, whose copies go to n1."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(courier, "AGAIN_S", 0.1)
    monkeypatch.setattr(courier, "SHORT_S", 0.3)


def copies(nodes: Nodes, node: str) -> list[int]:
    """Steps of which ``node`` holds copies for others."""
    return sorted(holding.step for holding in nodes.keepers[node].shelf.holdings()[0] if holding.replica)


def _replicas(nodes: Nodes, node: str) -> list[Stack]:
    return [stack for stack in nodes.keepers[node].shelf._stacks.values() if stack.replica]


def test_a_partner_that_dies_costs_copies_and_no_snapshots(nodes: Nodes) -> None:
    ranks = Ranks(nodes, CASE)
    for step in range(1, 4):
        ranks.step(step)
    nodes.drop("n1")
    for step in range(4, 30):
        ranks.step(step)
        assert ranks.snapshots[0].ready()
    assert nodes.kinds() == ["unreplicated"], "told once"
    assert (nodes.told[0]["partner"], nodes.told[0]["owner"]) == ("n1", "w0")
    found = newest_in_memory(nodes.addresses)
    assert found is not None
    assert found.step == 29
    ranks.close()


def test_a_partner_that_dies_while_a_copy_is_on_its_way_does_not_stop_snapshots(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    arriving = threading.Event()
    room = keeper.room_for_copy

    def slow(stack: Stack, complete: int | None) -> int:
        buffer = room(stack, complete)
        if complete == 2:
            arriving.set()
            time.sleep(0.3)
        return buffer

    monkeypatch.setattr(keeper, "room_for_copy", slow)
    ranks = Ranks(nodes, CASE)
    ranks.step(1)
    ranks.step(2)
    ranks.snapshots[0].note_complete()
    ranks.take(3)
    assert arriving.wait(10)
    nodes.drop("n1")
    until(ranks.snapshots[0].ready, "ready again")
    ranks.step(4)
    assert nodes.kinds() == ["unreplicated"]
    ranks.close()


def test_a_partner_that_comes_back_elsewhere_gets_copies_again(nodes: Nodes) -> None:
    ranks = Ranks(nodes, CASE)
    ranks.step(1)
    nodes.drop("n1")
    ranks.step(2)
    nodes.add("n1")
    ranks.step(3)
    assert copies(nodes, "n1") == [3]
    ranks.step(4)
    assert copies(nodes, "n1") == [3, 4]
    ranks.close()


@contextmanager
def vanished(node: str) -> Iterator[KeeperAddress]:
    """A machine that takes connections, and says nothing any more."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield KeeperAddress(node, "127.0.0.1", silent.getsockname()[1], "secret")


def test_a_partner_that_hangs_stops_no_snapshots_once_it_is_given_up(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SHIP_LIMIT_S is for a partner that is slow; the controller knows of one that is gone long before."""
    hang = threading.Event()
    monkeypatch.setattr(keeper, "finish_replica", lambda *_: hang.wait(60))
    ranks = Ranks(nodes, CASE)
    ranks.wait()
    ranks.take(1)
    time.sleep(0.2)
    assert not ranks.snapshots[0].ready(), "the copy is on its way"
    announce_ring([nodes.keepers["n0"].address])
    until(ranks.snapshots[0].ready, "ready again", 2.0)
    ranks.step(2)
    hang.set()
    ranks.close()


def test_a_partner_that_hangs_does_not_hold_up_the_start_of_a_generation(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(courier, "OPEN_S", 0.3)
    with vanished("n1") as nobody:
        announce_ring([nodes.keepers["n0"].address, nobody])
        began = time.monotonic()
        ranks = Ranks(nodes, CASE, strict=False)
        ranks.step(1)
        ranks.step(2)
        assert time.monotonic() - began < 3.0
        assert nodes.kinds() == ["unreplicated"]
        ranks.close()


def test_in_the_first_generation_a_partner_that_is_gone_is_an_error_that_names_it(nodes: Nodes) -> None:
    with vanished("n1") as nobody:
        pass
    announce_ring([nodes.keepers["n0"].address, nobody])
    with pytest.raises(KeeperError, match="the keeper of node n1 cannot be reached"):
        Ranks(nodes, CASE, strict=True)


def test_in_the_first_generation_too_little_memory_for_copies_is_an_error(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelf, "free_bytes", lambda _: 3 * (4096 + CASE.table(0).nbytes))
    case = Case(CASE.specs, Layout(dp_shard=1, dp_replicate=1), ("n0",), ("n0", "n1"))
    nodes.keepers["n1"].shelf.open(1, "w5", case.table(0), replica=False, strict=True)
    with pytest.raises(MemoryTooSmall, match=r"n1: .*bytes are needed"):
        Ranks(nodes, case, strict=True)


def test_a_connection_that_breaks_is_made_anew_and_costs_no_copy(nodes: Nodes) -> None:
    ranks = Ranks(nodes, CASE)
    ranks.step(1)
    ranks.step(2)
    before = _replicas(nodes, "n1")
    for channel in list(nodes.keepers["n1"]._channels):
        channel.cut()
    ranks.step(3)
    assert copies(nodes, "n1") == [2, 3]
    assert _replicas(nodes, "n1") == before
    assert not nodes.told
    ranks.close()


def test_a_partner_that_refuses_a_copy_keeps_those_that_it_has(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(nodes, CASE)
    ranks.step(1)
    ranks.step(2)
    with monkeypatch.context() as patch:
        patch.setattr(keeper, "finish_replica", lambda *_: 1 / 0)
        ranks.step(3)
    assert copies(nodes, "n1") == [2]
    assert "division" in nodes.told[0]["problem"]
    time.sleep(0.15)
    ranks.step(4)
    assert copies(nodes, "n1") == [2, 4]
    ranks.close()


def test_the_ring_may_change_at_any_moment(nodes: Nodes) -> None:
    nodes.add("n2", "n3")
    case = Case(CASE.specs, CASE.layout, CASE.nodes, ("n0", "n1", "n2", "n3"))
    ranks = Ranks(nodes, case)
    everyone = {address.node: address for address in nodes.addresses}
    stop = threading.Event()

    def turn() -> None:
        while not stop.is_set():
            for others in (["n1"], ["n2", "n3"], [], ["n3"], ["n1", "n2"]):
                announce_ring([everyone[node] for node in ("n0", *others)])

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        for step in range(1, 150):
            ranks.step(step)
    finally:
        stop.set()
        thread.join()
    assert not set(nodes.kinds()) - {"unreplicated"}
    nodes.announce()
    time.sleep(0.15)
    ranks.step(150)
    assert 150 in copies(nodes, "n1")
    ranks.close()


def test_a_partner_that_has_left_the_ring_is_no_longer_connected(nodes: Nodes) -> None:
    case = Case(CASE.specs, CASE.layout, CASE.nodes, ("n0", "n1", "n2"))
    nodes.add("n2")
    ranks = Ranks(nodes, case)
    ranks.step(1)
    assert [len(nodes.keepers[node]._channels) for node in ("n1", "n2")] == [1, 0]
    announce_ring([nodes.keepers[node].address for node in ("n0", "n2")])
    ranks.step(2)
    until(lambda: not nodes.keepers["n1"]._channels, "the connection to n1 ends")
    assert len(nodes.keepers["n2"]._channels) == 1
    nodes.announce()
    ranks.step(3)
    assert copies(nodes, "n1") == [1, 3]
    assert not nodes.told
    ranks.close()


def test_too_little_memory_for_copies_is_told_once_and_copies_come_when_there_is_more(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 4096 + CASE.table(0).nbytes
    grow = shelf.Shelf.grow
    short = threading.Event()
    short.set()

    def tight(self: shelf.Shelf, stack: Stack, most: int) -> bool:
        if stack.replica and short.is_set():
            raise MemoryTooSmall(f"{size} bytes are needed")
        return grow(self, stack, most)

    monkeypatch.setattr(shelf.Shelf, "grow", tight)
    ranks = Ranks(nodes, CASE, strict=False)
    began = time.monotonic()
    for step in range(1, 20):
        ranks.step(step)
    assert time.monotonic() - began < 5.0, "nobody waits for memory that cannot be had"
    assert nodes.kinds() == ["unreplicated"]
    assert "bytes are needed" in nodes.told[0]["problem"]
    short.clear()
    time.sleep(0.15)
    ranks.step(20)
    assert copies(nodes, "n1") == [20]
    ranks.close()


def test_a_generation_begins_with_the_memory_that_the_one_before_leaves_and_takes_the_rest_later(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the new generation has a complete snapshot, the old one's must stay; then there is room for all."""
    size = 4096 + CASE.table(0).nbytes
    node = nodes.keepers["n0"]
    monkeypatch.setattr(shelf, "free_bytes", lambda _: 3 * size - node.shelf.nbytes)
    first = Ranks(nodes, CASE)
    first.step(1)
    first.close()
    second = Ranks(nodes, CASE, generation=2, strict=False)
    snapshots = second.snapshots[0]
    assert not snapshots.lean
    assert snapshots.wait_ready(10.0, lambda: False)
    second.take(2)
    until(lambda: snapshots.settled, "the only buffer is settled")
    assert not snapshots.ready(), "there is no second buffer yet"
    snapshots.note_complete()
    assert snapshots.complete == 2
    forget(nodes.addresses, below=2)
    until(snapshots.ready, "the second buffer")
    second.step(3)
    assert "memory_short" not in nodes.kinds()
    second.close()


def test_a_lack_of_memory_that_lasts_is_told_once(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    grow = shelf.Shelf.grow

    def tight(self: shelf.Shelf, stack: Stack, most: int) -> bool:
        if not stack.replica and len(stack.buffers) == 1:
            raise MemoryTooSmall("4 bytes are needed, 3 are free")
        return grow(self, stack, most)

    monkeypatch.setattr(shelf.Shelf, "grow", tight)
    ranks = Ranks(nodes, CASE, strict=False)
    ranks.wait()
    ranks.take(1)
    until(lambda: ranks.snapshots[0].settled, "settled")
    until(lambda: nodes.told, "the lack is told", 5.0)
    time.sleep(0.5)
    assert nodes.kinds() == ["memory_short"]
    assert "4 bytes are needed" in nodes.told[0]["problem"]
    ranks.close()


def test_a_generation_that_ends_while_a_copy_is_on_its_way_makes_no_noise(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = keeper.finish_replica

    def slow(stack: Stack, buffer: int, step: int, digests: bytes) -> None:
        time.sleep(0.2)
        finish(stack, buffer, step, digests)

    monkeypatch.setattr(keeper, "finish_replica", slow)
    for generation in range(1, 4):
        ranks = Ranks(nodes, CASE, generation)
        ranks.wait()
        ranks.take(1)
        ranks.close()
        time.sleep(0.05)
        forget(nodes.addresses, below=generation + 1)
    time.sleep(0.4)
    assert not nodes.told
