"""Snapshots under a slow or failing keeper: at every instant some step is complete, and is not touched."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
from tests.support.memory import CPU, SHARED, Case, Nodes, Ranks, Spec, python, until

from planaria.layout import Layout
from planaria.memory import keeper
from planaria.memory.buffers import HEADER_BYTES, Seal, SharedBuffer, map_buffer, read_seal, write_seal
from planaria.memory.client import newest_in_memory
from planaria.memory.copies import begin_replica
from planaria.memory.courier import Courier
from planaria.memory.recall import MemoryState
from planaria.memory.shelf import Shelf, Stack
from planaria.memory.snapshots import Snapshots
from planaria.memory.table import Entry, Table
from planaria.memory.wire import KeeperLink
from planaria.state.boxes import Box

SPECS = (Spec("a", (12, 4)), Spec("b", (3,), torch.int64))


class Drainer:
    """Storage that is as slow as it is told to be."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.written: list[tuple[int, bool]] = []
        """(step, whether its bytes stayed as they were)."""

    def __call__(self, stack: Stack, buffer: int, message: dict[str, int]) -> None:
        if buffer >= len(stack.buffers):
            return  # its node was lost before it began
        data = stack.buffers[buffer].data
        before = bytes(data)
        self.go.wait(20)
        self.written.append((message["step"], bytes(data) == before))


def _complete(nodes: Nodes) -> int | None:
    source = newest_in_memory(nodes.addresses)
    return None if source is None else source.step


@pytest.mark.parametrize("lose", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_whatever_the_order_the_newest_complete_step_is_never_touched(seed: int, lose: bool) -> None:
    """Ranks take, votes pass or fail, copies are slow, drains begin and end; then a node is lost, or none and
    there are no copies that could hide what is overwritten."""
    dice, drainer = random.Random(seed), Drainer()
    with Nodes(replicas=int(lose)) as nodes, pytest.MonkeyPatch.context() as patch:
        _slow_shipping(patch, dice)
        patch.setattr(keeper, "DRAIN_BUFFERS", dice.choice([2, 3]))
        nodes.add("n0", "n1", "n2", drain=drainer)
        case = Case(SPECS, Layout(dp_shard=3), ("n0", "n1", "n2"), ("n0", "n1", "n2"))
        ranks = Ranks(nodes, case)
        known: int | None = None
        pinned = False
        for step in range(1, 25):
            time.sleep(dice.choice([0.0, 0.001, 0.004]))
            # As the training loop does: votes are summed over all ranks, and all do the same.
            if not pinned and (dice.random() < 0.1 or (known is None and step > 12)):
                ranks.wait()  # for a change of size; or on a machine so busy that nothing was complete yet
            if all([snapshots.settled for snapshots in ranks.snapshots]):
                for snapshots in ranks.snapshots:
                    snapshots.note_complete()
                known = ranks.snapshots[0].complete
            if all([snapshots.ready() for snapshots in ranks.snapshots]):
                for rank in dice.sample(range(3), 3):
                    ranks.take(step, rank)
                    if dice.random() < 0.3:
                        _look(nodes, known)
                if not pinned and dice.random() < 0.3:
                    pinned = True
                    drainer.go.clear()
                    for rank, snapshots in enumerate(ranks.snapshots):
                        snapshots.drain(step, "t", rank)
            if pinned and dice.random() < 0.3:
                drainer.go.set()
                for snapshots in ranks.snapshots:
                    assert snapshots.wait_drained(10.0, lambda: False)
                pinned = False
            if dice.random() < 0.3:
                _look(nodes, known)
        if lose:
            nodes.drop(dice.choice(["n0", "n1", "n2"]))
        _look(nodes, known)
        drainer.go.set()
        ranks.close()
        assert known is not None
        assert known > 3
    assert all(same for _, same in drainer.written), "a pinned buffer was overwritten"


def _look(nodes: Nodes, known: int | None) -> None:
    """Recovery, at this very moment, finds a step that is not older than what is known to be complete."""
    if known is None:
        return
    source = newest_in_memory(nodes.addresses)
    assert source is not None
    assert source.step >= known
    wanted = [(spec.name, Box.whole(spec.shape)) for spec in SPECS]
    state = MemoryState(source, "elsewhere", 0, wanted)
    for spec in SPECS:
        assert torch.equal(state.read(spec.name, Box.whole(spec.shape)), spec.value(source.step))


def _slow_shipping(patch: pytest.MonkeyPatch, dice: random.Random) -> None:
    pause, ship = threading.Event(), Courier._ship

    def slowly(self: Courier, step: int, complete: int | None) -> None:
        pause.wait(dice.choice([0.0, 0.0, 0.003]))
        ship(self, step, complete)

    patch.setattr(Courier, "_ship", slowly)


@pytest.mark.parametrize(
    ("held", "complete", "chosen"),
    [
        ([None, None], None, 0),
        ([4, None], 4, 1),
        ([None, 4], 4, 0),
        ([4, 5], 5, 0),
        ([4, 5], 4, 1),  # of the step that is complete everywhere, though another copy is newer
        ([5, 4], None, 1),
        ([4], 4, None),
        ([], None, None),
    ],
)
def test_a_copy_goes_where_the_oldest_is_and_never_where_the_complete_one_is(
    held: list[int | None], complete: int | None, chosen: int | None
) -> None:
    stack = Stack(1, "w0", True, Table.of([], {}), [SharedBuffer(SHARED, HEADER_BYTES) for _ in held])
    for buffer, step in zip(stack.buffers, held, strict=True):
        if step is not None:
            write_seal(buffer.map, Seal(1, step))
    assert begin_replica(stack, complete) == chosen
    left = [read_seal(buffer.map) for buffer in stack.buffers]
    assert left == [None if step is None or at == chosen else Seal(1, step) for at, step in enumerate(held)]
    stack.close()


def test_training_goes_on_with_three_buffers_while_one_is_drained() -> None:
    drainer = Drainer()
    with Nodes() as nodes:
        nodes.add("n0", "n1", drain=drainer)
        ranks = Ranks(nodes, Case(SPECS, Layout(dp_shard=2), ("n0", "n1"), ("n0", "n1")))
        ranks.step(1)
        for rank, snapshots in enumerate(ranks.snapshots):
            snapshots.drain(1, "t", rank)
        for step in range(2, 8):
            ranks.step(step)
        assert all(snapshots.draining for snapshots in ranks.snapshots)
        drainer.go.set()
        for snapshots in ranks.snapshots:
            assert snapshots.wait_drained(10.0, lambda: False)
        assert drainer.written == [(1, True), (1, True)]
        assert {len(stack.buffers) for stack in _own(nodes)} == {3}
        for step in range(8, 20):
            ranks.step(step)
            assert _complete(nodes) == step
        ranks.close()


def test_many_drains_need_no_more_than_three_buffers() -> None:
    drainer = Drainer()
    drainer.go.set()
    with Nodes() as nodes:
        nodes.add("n0", drain=drainer)
        ranks = Ranks(nodes, Case(SPECS, Layout(), ("n0",), ("n0",)))
        for step in range(1, 60):
            ranks.step(step)
            ranks.snapshots[0].drain(step, "t", 0)
            assert ranks.snapshots[0].wait_drained(10.0, lambda: False)
        until(lambda: {len(stack.buffers) for stack in _own(nodes)} == {3}, "the third buffer")
        ranks.close()


def test_a_drain_of_what_is_not_held_is_told_and_unpins_the_buffer(nodes: Nodes) -> None:
    ranks = Ranks(nodes, Case(SPECS, Layout(), ("n0",), ("n0", "n1")))
    ranks.step(1)
    stack = _own(nodes)[0]
    nodes.keepers["n0"].shelf.drop(stack, stack.buffer_of(1))
    ranks.snapshots[0].drain(1, "t", 0)
    until(lambda: "drain_failed" in nodes.kinds(), "the failure is told")
    assert ranks.snapshots[0].wait_drained(5.0, lambda: False)
    ranks.close()


def test_a_drain_goes_on_when_its_generation_is_forgotten() -> None:
    drainer = Drainer()
    with Nodes() as nodes:
        nodes.add("n0", drain=drainer)
        ranks = Ranks(nodes, Case(SPECS, Layout(), ("n0",), ("n0",)))
        ranks.step(1)
        before: list[bytes] = []

        def slow(stack: Stack, buffer: int, message: dict[str, int]) -> None:
            view = stack.entry_view(buffer, 0)
            before.append(bytes(view))
            drainer.go.wait(20)
            before.append(bytes(view))

        nodes.keepers["n0"]._drain = slow
        ranks.snapshots[0].drain(1, "t", 0)
        until(lambda: before, "the drain begins")
        ranks.close()
        nodes.keepers["n0"]._forget(2, None, None)
        drainer.go.set()
        until(lambda: len(before) == 2, "the drain ends")
        assert before[0] == before[1]


def test_with_a_single_buffer_snapshots_are_made_only_where_they_must(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(SPECS, Layout(), ("n0",), ("n0", "n1"))
    size = HEADER_BYTES + case.table(0).nbytes
    monkeypatch.setattr("planaria.memory.shelf.free_bytes", lambda folder: size)
    ranks = Ranks(nodes, case, strict=False)
    snapshots = ranks.snapshots[0]
    assert snapshots.lean
    for step in (1, 2, 3):
        assert not snapshots.ready()
        assert snapshots.wait_ready(10.0, lambda: False)
        ranks.take(step)
        until(lambda: snapshots.settled, "settled")
        assert _complete(nodes) == step
    assert [len(stack.buffers) for stack in _own(nodes)] == [1]
    ranks.close()


WRITER = """
import os, signal, sys, torch
from planaria.memory import snapshots as module
from planaria.memory.snapshots import Snapshots
from planaria.memory.table import Table
from planaria.memory.wire import KeeperAddress, KeeperLink

node, host, port, token = sys.argv[1:5]
table = Table.decode(bytes.fromhex(sys.argv[5]))
link = KeeperLink(KeeperAddress(node, host, int(port), token))
snapshots = Snapshots(link, 1, "w0", table, torch.device("cpu"), True)
for step in range(1, 4):
    assert snapshots.wait_ready(20.0, lambda: False)
    snapshots.note_complete()
    tensors = [torch.full(entry.box.shape, step, dtype=torch.float32) for entry in table.entries]
    if step == 3:
        copy = torch._foreach_copy_

        def die(targets, sources):
            copy(targets[: len(targets) // 2], sources[: len(targets) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

        torch._foreach_copy_ = die
    snapshots.take(step, tensors)
"""


def test_a_writer_killed_in_the_middle_leaves_the_snapshot_before(nodes: Nodes) -> None:
    box = Box.whole((64, 16))
    names = [f"t{at}" for at in range(6)]
    table = Table.of([Entry(name, box.shape, "F32", box, 0, 4096) for name in names], dict.fromkeys(names, box.shape))
    address = nodes.keepers["n0"].address
    arguments = (address.node, address.host, str(address.port), address.token, table.encoded.hex())
    writer = python(WRITER, *arguments)
    try:
        assert writer.wait(60) == -9
    finally:
        writer.kill()
        writer.communicate()
    buffers = _own(nodes)[0].buffers
    seals = [read_seal(map_buffer(buffer.path, writable=False)) for buffer in buffers]
    assert [seal and seal.step for seal in seals] in ([None, 2], [2, None])
    broken = buffers[seals.index(None)]
    assert b"\0\0\x40\x40" in bytes(broken.data), "the third snapshot had begun"
    for lost in (None, "n0"):
        if lost:
            nodes.drop(lost)
        source = newest_in_memory(nodes.addresses)
        assert source is not None
        assert source.step == 2
        state = MemoryState(source, "n1", 0, [(name, box) for name in names])
        assert all(torch.equal(state.read(name, box), torch.full(box.shape, 2.0)) for name in names)


def test_a_keeper_that_is_gone_fails_the_snapshot_and_not_silently(nodes: Nodes) -> None:
    ranks = Ranks(nodes, Case(SPECS, Layout(), ("n0",), ("n0", "n1")))
    ranks.step(1)
    nodes.drop("n0")
    with pytest.raises(RuntimeError, match="n0"):
        for step in range(2, 5):
            ranks.take(step)
    ranks.close()


def test_waiting_ends_when_the_generation_is_aborted(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Courier, "_ship", lambda *_: None)
    ranks = Ranks(nodes, Case(SPECS, Layout(), ("n0",), ("n0", "n1")))
    ranks.wait()
    ranks.take(1)
    assert not ranks.snapshots[0].wait_ready(60.0, lambda: True)
    assert not ranks.snapshots[0].wait_ready(0.05, lambda: False)
    ranks.close()


def test_a_connection_that_the_keeper_refuses_is_closed(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shelf, "open", lambda *_, **__: 1 / 0)
    link = KeeperLink(nodes.keepers["n0"].address)
    with pytest.raises(RuntimeError, match="division"):
        Snapshots(link, 1, "w0", Table.of([], {}), CPU, True)
    assert link.channel._socket.fileno() == -1


def _own(nodes: Nodes) -> list[Stack]:
    """The stacks of the nodes' own workers."""
    return [stack for keeper in nodes.keepers.values() for stack in keeper.shelf._stacks.values() if not stack.replica]
