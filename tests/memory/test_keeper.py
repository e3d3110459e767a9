"""The keeper as a server: who gets in, what harms it, what it gives back."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import struct
import threading
import time
from dataclasses import replace

import pytest
import torch
from tests.support.memory import Case, Nodes, Ranks, Spec, until

from planaria.layout import Layout
from planaria.memory.client import ANSWER_S, forget, newest_in_memory, usage
from planaria.memory.table import Table
from planaria.memory.wire import KeeperAddress, KeeperError, KeeperLink, PeerGone

CASE = Case((Spec("a", (64, 16)), Spec("b", (5,), torch.bfloat16)), Layout(dp_shard=2), ("n0", "n1"), ("n0", "n1"))


def test_a_peer_without_the_secret_is_cut_off(nodes: Nodes) -> None:
    for token in ("", "wrong", "secre", "secret2"):
        link = KeeperLink(replace(nodes.keepers["n0"].address, token=token), 5.0)
        with pytest.raises(PeerGone):
            link.call({"op": "stat"})
        link.close()


def test_nothing_is_done_for_a_peer_that_has_not_greeted(nodes: Nodes) -> None:
    ranks = Ranks(nodes, CASE)
    ranks.step(1)
    with socket.create_connection(_place(nodes)) as raw:
        head = json.dumps({"op": "forget", "below": 100, "keep": None, "step": None}).encode()
        raw.sendall(struct.pack(">I", len(head)) + head)
        assert raw.recv(1) == b""
    assert newest_in_memory(nodes.addresses) is not None
    ranks.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: n0\r\n\r\n",
        b"\x00\x00\x00\x02[]",
        b"\x00\x00\x00\x04null",
        b"\x00\x00\x04\x00" + b"[" * 1024,
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x11" + b'{"bytes": 1e9999}',
        b"\x00\x00\x00\x10" + b'{"bytes": "abc"}',
        b"\x00\x00",
        b"",
    ],
    ids=repr,
)
def test_garbage_on_the_port_harms_nothing(nodes: Nodes, garbage: bytes) -> None:
    with socket.create_connection(_place(nodes)) as raw:
        raw.sendall(garbage)
        raw.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert raw.recv(1) == b""
    assert usage(nodes.addresses).keys() == {"n0", "n1"}


@pytest.mark.parametrize(
    "message",
    [
        {"op": "nonsense"},
        {"op": None},
        {},
        {"op": "fetch"},
        {"op": "fetch", "gen": 1, "owner": "w0", "replica": False, "step": 9, "parts": []},
        {"op": "fetch", "gen": 1, "owner": "w0", "replica": False, "step": 1, "parts": [[99, 0, 1]]},
        {"op": "verify", "gen": 1, "owner": "w0", "replica": False, "step": 1, "entries": ["x"]},
        {"op": "buffers", "gen": 1, "owner": "nobody"},
        {"op": "replica", "gen": 1, "owner": "nobody", "step": 1, "complete": None},
        {"op": "forget", "below": None, "keep": None, "step": None},
    ],
    ids=str,
)
def test_a_wrong_request_is_answered_and_the_connection_lives(nodes: Nodes, message: dict[str, object]) -> None:
    ranks = Ranks(nodes, CASE)
    ranks.step(1)
    link = KeeperLink(nodes.keepers["n0"].address, 5.0)
    for payload in ([], [b"x" * 3_000_000]):
        with pytest.raises(KeeperError, match="n0"):
            link.call(message, payload)
        assert link.call({"op": "stat"})["used"] > 0
    link.close()
    ranks.close()


def test_a_copy_of_another_size_than_its_table_says_is_refused(nodes: Nodes) -> None:
    link = KeeperLink(nodes.keepers["n0"].address, 5.0)
    table = CASE.table(0)
    link.call({"op": "replica_open", "gen": 1, "owner": "w7"}, [table.encoded])
    with pytest.raises(KeeperError, match="another size"):
        link.call({"op": "replica", "gen": 1, "owner": "w7", "step": 1, "complete": None}, [b"x" * 100])
    link.close()


def test_old_generations_are_forgotten_but_the_one_to_keep(nodes: Nodes) -> None:
    for generation in (1, 2, 3):
        ranks = Ranks(nodes, CASE, generation)
        ranks.step(10 - generation)
        ranks.close()
    forget(nodes.addresses, below=3, keep=1)
    held = {(h.generation, h.step) for keeper in nodes.keepers.values() for h in keeper.shelf.holdings()[0]}
    assert held == {(1, 9), (3, 7)}
    forget(nodes.addresses, below=3)
    found = newest_in_memory(nodes.addresses)
    assert found is not None
    assert (found.generation, found.step) == (3, 7)


def test_of_the_generation_to_keep_only_one_state_takes_memory(nodes: Nodes) -> None:
    ranks = Ranks(nodes, CASE, 1)
    for step in (5, 6):
        ranks.step(step)
    ranks.close()
    stacks = [stack for keeper in nodes.keepers.values() for stack in keeper.shelf._stacks.values()]
    assert {len(stack.buffers) for stack in stacks} == {2}
    before = sum(answer["used"] for answer in usage(nodes.addresses).values())
    forget(nodes.addresses, below=2, keep=1, step=6)
    after = sum(answer["used"] for answer in usage(nodes.addresses).values())
    assert before - after == sum(stack.table.nbytes for stack in stacks), "of two snapshots one is left"
    held = {(h.generation, h.step) for keeper in nodes.keepers.values() for h in keeper.shelf.holdings()[0]}
    assert held == {(1, 6)}


def test_a_late_word_does_not_bring_a_generation_back(nodes: Nodes) -> None:
    late = KeeperLink(nodes.keepers["n0"].address, 5.0)
    ranks = Ranks(nodes, CASE, generation=2)
    ranks.step(1)
    ranks.close()
    forget(nodes.addresses, below=3)
    for message in ({"op": "open", "strict": False}, {"op": "replica_open"}):
        with pytest.raises(KeeperError, match="generation 2 is over"):
            late.call(message | {"gen": 2, "owner": "w0"}, [CASE.table(0).encoded])
    assert {answer["used"] for answer in usage(nodes.addresses).values()} == {0}
    late.close()


def test_the_bytes_held_stay_the_same_over_many_snapshots(nodes: Nodes) -> None:
    ranks = Ranks(nodes, CASE)
    for step in range(4):
        ranks.step(step)
    used, descriptors, threads = usage(nodes.addresses), _descriptors(), threading.active_count()
    kept = {key: len(stack.checksums) for key, stack in nodes.keepers["n0"].shelf._stacks.items()}
    for step in range(4, 504):
        ranks.step(step)
    assert {node: now["used"] for node, now in usage(nodes.addresses).items()} == {
        node: before["used"] for node, before in used.items()
    }
    until(lambda: _descriptors() <= descriptors, "no more descriptors")
    until(lambda: threading.active_count() <= threads, "no more threads")
    assert {key: len(stack.checksums) for key, stack in nodes.keepers["n0"].shelf._stacks.items()} == kept
    ranks.close()


def test_a_generation_leaves_no_threads_connections_or_mappings(nodes: Nodes) -> None:
    def generation(number: int) -> None:
        ranks = Ranks(nodes, CASE, number)
        ranks.step(number)
        source = newest_in_memory(nodes.addresses)
        assert source is not None
        assert source.generation == number
        ranks.close()
        forget(nodes.addresses, below=number + 1)

    generation(1)
    until(lambda: _peers() == 0, "connections end")
    before = (_descriptors(), threading.active_count(), _mappings())
    for number in range(2, 12):
        generation(number)
    until(lambda: _peers() == 0, "connections end")
    gc.collect()
    until(lambda: (_descriptors(), threading.active_count(), _mappings()) <= before, "nothing is left")
    assert {answer["used"] for answer in usage(nodes.addresses).values()} == {0}


def test_closing_gives_all_memory_back_and_ends_all_threads() -> None:
    before = (_descriptors(), threading.active_count(), _mappings())
    with Nodes() as nodes:
        nodes.add("n0", "n1", "n2")
        ranks = Ranks(nodes, CASE)
        ranks.step(1)
        ranks.close()
    del nodes, ranks
    gc.collect()
    until(lambda: threading.active_count() <= before[1], "threads end")
    gc.collect()
    assert _descriptors() <= before[0]
    assert _mappings() <= before[2]


def test_a_worker_that_opens_twice_begins_anew(nodes: Nodes) -> None:
    ranks = Ranks(nodes, CASE)
    ranks.step(1)
    threads = threading.active_count()
    again = Ranks(nodes, CASE)
    again.step(1)
    again.step(2)
    found = newest_in_memory(nodes.addresses)
    assert found is not None
    assert found.step == 2
    ranks.close()
    until(lambda: threading.active_count() <= threads, "the first couriers end")
    again.close()


def test_keepers_that_do_not_answer_cost_two_seconds_and_no_more(nodes: Nodes) -> None:
    ranks = Ranks(nodes, CASE)
    ranks.step(1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        nobody = KeeperAddress("n9", "127.0.0.1", silent.getsockname()[1], "secret")
        began = time.monotonic()
        source = newest_in_memory([*nodes.addresses, nobody])
        assert time.monotonic() - began < ANSWER_S + 1.0
    assert source is not None
    assert source.step == 1
    ranks.close()


def test_an_older_announcement_of_the_ring_that_comes_late_is_ignored(nodes: Nodes) -> None:
    keeper = nodes.keepers["n0"]
    link = KeeperLink(keeper.address, 5.0)
    as_of = time.monotonic_ns()
    link.call({"op": "ring", "keepers": [["n0", "h", 1]], "as_of": as_of})
    link.call({"op": "ring", "keepers": [["n0", "h", 1], ["n1", "h", 2]], "as_of": as_of - 1})
    assert [address.node for address in keeper._ring] == ["n0"]
    link.close()


def test_tables_without_slices_are_held_too(nodes: Nodes) -> None:
    """What a rank has whose slices other ranks of its node keep."""
    snapshots = nodes.snapshots("n0", "w0", Table.of([], {"a": (4,)}))
    assert snapshots.wait_ready(10.0, lambda: False)
    snapshots.take(1, [])
    until(lambda: snapshots.settled, "settled")
    snapshots.close()


def _place(nodes: Nodes) -> tuple[str, int]:
    address = nodes.keepers["n0"].address
    return address.host, address.port


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _mappings() -> int:
    """Mappings of nameless files."""
    with open("/proc/self/maps") as maps:
        return sum(1 for line in maps if "(deleted)" in line and "/dev/zero" not in line)


def _peers() -> int:
    names = [thread.name for thread in threading.enumerate()]
    return sum(1 for name in names if name.startswith(("keeper-peer", "courier-")))
