"""Damage in memory and on the wire: found, named, never used."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from tests.support.memory import Case, Nodes, Ranks, Spec, until

from planaria.layout import Layout
from planaria.memory.client import newest_in_memory
from planaria.memory.recall import MemorySource, MemoryState
from planaria.memory.shelf import Stack
from planaria.memory.wire import KeeperError, KeeperLink
from planaria.state.boxes import Box
from planaria.state.checksum import digest

SPECS = (Spec("a", (64, 16)), Spec("b", (6,), torch.bfloat16))
CASE = Case(SPECS, Layout(dp_shard=2), ("n0", "n1"), ("n0", "n1"))
WANTED = [(spec.name, Box.whole(spec.shape)) for spec in SPECS]


def damage(nodes: Nodes, node: str, step: int, *, replica: bool, tensor: str = "a") -> str:
    """Flip one bit of a slice; returns its name."""
    for stack in nodes.keepers[node].shelf._stacks.values():
        if stack.replica is replica:
            at = next(at for at, entry in enumerate(stack.table.entries) if entry.tensor == tensor)
            view = stack.entry_view(stack.buffer_of(step), at)
            view[len(view) // 2] ^= 4
            return str(stack.table.entries[at])
    raise AssertionError("nothing to damage")


def check(source: MemorySource, node: str) -> None:
    state = MemoryState(source, node, 0, WANTED)
    for spec in SPECS:
        assert torch.equal(state.read(spec.name, Box.whole(spec.shape)), spec.value(source.step))


def newest(nodes: Nodes) -> MemorySource:
    source = newest_in_memory(nodes.addresses)
    assert source is not None
    return source


@pytest.mark.parametrize("reader", ["n0", "elsewhere"])
def test_damage_is_found_named_and_dropped_and_an_older_step_taken(nodes: Nodes, reader: str) -> None:
    ranks = Ranks(nodes, CASE)
    ranks.step(1)
    ranks.step(2)
    ranks.close()
    nodes.drop("n1")
    name = damage(nodes, "n0", 2, replica=False)
    source = newest(nodes)
    assert source.step == 2
    with pytest.raises(KeeperError, match=r"n0.*a\[.* of step 2 in memory does not match its checksum"):
        check(source, reader)
    assert [(m["t"], m["owner"], m["slice"]) for m in nodes.told] == [("memory_damaged", "w0", name)]
    source = newest(nodes)
    assert source.step == 1
    check(source, reader)


def test_where_another_node_has_a_sound_copy_the_step_is_found_again(nodes: Nodes) -> None:
    ranks = Ranks(nodes, CASE)
    ranks.step(1)
    ranks.step(2)
    ranks.close()
    damage(nodes, "n0", 2, replica=True)
    with pytest.raises(KeeperError, match="checksum"):
        check(newest(nodes), "n0")
    source = newest(nodes)
    assert source.step == 2
    check(source, "n0")


def test_damage_between_two_recoveries_is_found_by_the_second(nodes: Nodes) -> None:
    ranks = Ranks(nodes, CASE)
    ranks.step(1)
    ranks.close()
    for reader in ("n0", "elsewhere"):
        check(newest(nodes), reader)
    damage(nodes, "n0", 1, replica=False)
    with pytest.raises(KeeperError, match="checksum"):
        check(newest(nodes), "n0")


def test_damage_to_what_nobody_asks_for_harms_nobody(nodes: Nodes) -> None:
    ranks = Ranks(nodes, CASE)
    ranks.step(1)
    ranks.close()
    damage(nodes, "n0", 1, replica=False, tensor="b")
    box = Box.whole((64, 16))
    state = MemoryState(newest(nodes), "n0", 0, [("a", box)])
    assert torch.equal(state.read("a", box), SPECS[0].value(1))


def test_a_copy_that_arrives_damaged_is_refused(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    table = CASE.table(0)
    link = KeeperLink(nodes.keepers["n1"].address, 5.0)
    link.call({"op": "replica_open", "gen": 1, "owner": "w7"}, [table.encoded])
    message = {"op": "replica", "gen": 1, "owner": "w7", "complete": None}
    data = bytes(range(256)) * (table.nbytes // 256) + bytes(table.nbytes % 256)
    digests = [digest(data[entry.offset : entry.offset + entry.nbytes]) for entry in table.entries]
    link.call(message | {"step": 1}, [*digests, data])
    damaged = data[:100] + bytes([data[100] ^ 1]) + data[101:]
    with pytest.raises(KeeperError, match=r"step 2 arrived damaged"):
        link.call(message | {"step": 2, "complete": 1}, [*digests, damaged])
    assert [holding.step for holding in nodes.keepers["n1"].shelf.holdings()[0]] == [1]
    link.call(message | {"step": 3, "complete": 1}, [*digests, data])
    assert [holding.step for holding in nodes.keepers["n1"].shelf.holdings()[0]] in ([1, 3], [3, 1])
    link.close()


def test_a_sender_that_dies_in_the_middle_of_a_copy_leaves_the_one_before(nodes: Nodes) -> None:
    table = CASE.table(0)
    data = bytes(table.nbytes)
    digests = [digest(data[entry.offset : entry.offset + entry.nbytes]) for entry in table.entries]
    message = {"op": "replica", "gen": 1, "owner": "w7", "complete": None, "step": 1}
    opening = {"op": "replica_open", "gen": 1, "owner": "w7"}
    link = KeeperLink(nodes.keepers["n1"].address, 5.0)
    link.call(opening, [table.encoded])
    link.call(message, [*digests, data])
    half = KeeperLink(nodes.keepers["n1"].address, 5.0)
    total = len(digests) * 16 + table.nbytes
    # Says how much will come, and sends half of it.
    half.channel._socket.sendall(_framed(message | {"step": 2, "complete": 1, "bytes": total}, data[: total // 2]))
    until(lambda: any(stack.receiving.locked() for stack in _stacks(nodes, "n1")), "the copy arrives")
    assert [holding.step for holding in nodes.keepers["n1"].shelf.holdings()[0]] == [1]
    half.close()
    until(lambda: not any(stack.receiving.locked() for stack in _stacks(nodes, "n1")), "the end is noticed")
    assert [holding.step for holding in nodes.keepers["n1"].shelf.holdings()[0]] == [1]
    link.call(message | {"step": 3, "complete": 1}, [*digests, data])
    link.close()


def test_two_senders_do_not_write_into_one_another(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A courier that gave up and tries again, while its first attempt still holds on."""
    monkeypatch.setattr("planaria.memory.keeper.RECEIVE_S", 0.2)
    table = CASE.table(0)
    data = bytes(table.nbytes)
    digests = [digest(data[entry.offset : entry.offset + entry.nbytes]) for entry in table.entries]
    message = {"op": "replica", "gen": 1, "owner": "w7", "complete": None, "step": 1}
    first, second = (KeeperLink(nodes.keepers["n1"].address, 5.0) for _ in range(2))
    first.call({"op": "replica_open", "gen": 1, "owner": "w7"}, [table.encoded])
    total = len(digests) * 16 + table.nbytes
    first.channel._socket.sendall(_framed(message | {"bytes": total}, b"x" * 100))
    until(lambda: any(stack.receiving.locked() for stack in _stacks(nodes, "n1")), "the copy arrives")
    with pytest.raises(KeeperError, match="still arriving"):
        second.call(message | {"step": 2}, [*digests, data])
    first.close()
    until(lambda: not any(stack.receiving.locked() for stack in _stacks(nodes, "n1")), "the end is noticed")
    second.call(message | {"step": 2}, [*digests, data])
    second.close()


def test_damage_on_the_wire_is_found_by_the_reader(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(nodes, CASE)
    ranks.step(1)
    ranks.close()
    monkeypatch.setattr("planaria.memory.keeper.digest", lambda view: digest(bytes(view) + b"x"))
    with pytest.raises(KeeperError, match="arrived damaged from node n"):
        check(newest(nodes), "elsewhere")


def _framed(message: dict[str, object], payload: bytes) -> bytes:
    head = json.dumps(message).encode()
    return struct.pack(">I", len(head)) + head + payload


def _stacks(nodes: Nodes, node: str) -> list[Stack]:
    return list(nodes.keepers[node].shelf._stacks.values())
