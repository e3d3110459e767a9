"""The keeper of one node's memory: owns the snapshots of its workers, keeps copies for others, hands them out.

A server of its own rather than Ray calls: state moves from socket to shared memory without a copy, as large as it
is, and answers come in less than a millisecond. It listens on one interface and admits who knows the run's secret.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from planaria.memory.buffers import MemoryTooSmall, free_bytes
from planaria.memory.copies import finish_replica, room_for_copy
from planaria.memory.courier import Courier, Tell
from planaria.memory.shelf import REPLICA_BUFFERS, NotHeld, Shelf, Stack
from planaria.memory.table import Table
from planaria.memory.wire import Channel, KeeperAddress, KeeperError, Message, PeerGone, admitted
from planaria.state.checksum import DIGEST_BYTES, digest

GREETING_S = 10.0
RECEIVE_S = 30.0
"""Longest wait of an arriving copy for another one, whose sender has given up, to end."""
DRAIN_BUFFERS = 3
"""Buffers of a worker once one of them is being written to durable storage."""

Drain = Callable[[Stack, int, Message], None]
"""Writes (stack, buffer) to durable storage; blocks; never raises."""


class Keeper:
    """Serves until :meth:`close`.

    Args:
        node: name of the node, unique in the run.
        host: address of the interface to listen on.
        token: the run's secret.
        folder: where shared memory is, e.g. ``/dev/shm``.
        replicas: copies on other nodes of every slice that no other node holds anyway.
        tell: takes messages for the controller; from any thread.
        drain: see :data:`Drain`.
    """

    def __init__(self, node: str, host: str, token: str, folder: str, replicas: int, tell: Tell, drain: Drain) -> None:
        self._node, self._folder, self._replicas, self._tell, self._drain = node, folder, replicas, tell, drain
        self._token = token
        self.shelf = Shelf(node, folder)
        self._ring: Sequence[KeeperAddress] = ()
        self._ring_as_of = 0
        self._channels: set[Channel] = set()
        self._couriers: dict[tuple[int, str], Courier] = {}
        self._verified: set[tuple[int, str, bool, int, int, int]] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server((host, 0), backlog=128)
        self._closing = False
        self.address = KeeperAddress(node, host, self._listener.getsockname()[1], token)
        threading.Thread(target=self._accept, name="keeper", daemon=True).start()

    def close(self) -> None:
        """Stop serving and give all memory back."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            self._ring = ()
            for channel in self._channels:
                channel.cut()
            for courier in self._couriers.values():
                courier.ring_changed()
        self._forget(1 << 62, None, None)
        self.shelf.close()

    # -- connections -------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                time.sleep(0.01)  # no descriptor is free, for example
                continue
            threading.Thread(target=self._serve, args=(connection,), name="keeper-peer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            channel = Channel(connection)
        except OSError:
            connection.close()
            return
        try:
            channel.limit(GREETING_S)
            if not admitted(channel, self._token):
                return
            channel.limit(None)
            with self._lock:
                self._channels.add(channel)
            while not self._closing and (message := channel.receive()) is not None:
                self._answer(channel, message)
        except (OSError, KeeperError, ValueError, TypeError):
            return  # the peer is gone, or speaks another language
        finally:
            with self._lock:
                self._channels.discard(channel)
            channel.close()

    def _answer(self, channel: Channel, message: Message) -> None:
        name = str(message.get("op"))
        handler: Callable[[Channel, Message], Message | None] | None = getattr(self, f"op_{name}", None)
        try:
            if handler is None:
                raise KeeperError(f"no such request: {name}")
            answer = handler(channel, message)
        except PeerGone:
            raise
        except Exception as error:  # whatever it is, somebody waits for the answer
            expected = isinstance(error, KeeperError | NotHeld | MemoryTooSmall)
            text = str(error) if expected else f"{type(error).__name__}: {error}"
            answer = {"error": text, "kind": type(error).__name__}
        channel.skip()
        if answer is not None:
            channel.send(answer)

    # -- a worker of this node ---------------------------------------------------------------------

    def op_open(self, channel: Channel, message: Message) -> Message:
        """A worker begins a generation; the table follows. Answers with the path of the control page."""
        table = Table.decode(channel.receive_bytes(message["bytes"]))
        generation, owner, strict = message["gen"], message["owner"], message["strict"]
        stack = self.shelf.open(generation, owner, table, replica=False, strict=strict)
        courier = Courier(self.shelf, stack, self._node, self._replicas, lambda: self._ring, self._tell)
        courier.start(strict)
        with self._lock:
            before = self._couriers.pop((generation, owner), None)
            self._couriers[generation, owner] = courier
        if before is not None:
            before.stop()
        assert stack.control is not None
        return {"control": stack.control.path, "lean": stack.lean}

    def op_buffers(self, channel: Channel, message: Message) -> Message:
        """Paths of a worker's buffers."""
        stack = self.shelf.get(message["gen"], message["owner"], replica=False)
        return {"paths": [buffer.path for buffer in stack.buffers]}

    def op_sealed(self, channel: Channel, message: Message) -> None:
        """A worker has completed a snapshot."""
        with self._lock:
            courier = self._couriers.get((message["gen"], message["owner"]))
        if courier is not None:
            courier.sealed(message["step"], message["complete"])

    def op_drain(self, channel: Channel, message: Message) -> None:
        """Write a worker's snapshot to durable storage; the worker has pinned the buffer."""
        stack: Stack | None = None
        try:
            stack = self.shelf.get(message["gen"], message["owner"], replica=False)
            buffer = stack.buffer_of(message["step"])
        except NotHeld as error:
            _unpin(stack)
            self._tell({"t": "drain_failed", **_plain(message), "problem": str(error)})
            return
        threading.Thread(target=self._drain_one, args=(stack, buffer, message), name="drain", daemon=True).start()
        if not stack.lean and len(stack.buffers) < DRAIN_BUFFERS:
            threading.Thread(target=self._grow_for_drain, args=(stack,), name="grow", daemon=True).start()

    def _drain_one(self, stack: Stack, buffer: int, message: Message) -> None:
        try:
            self._drain(stack, buffer, message)
        finally:
            _unpin(stack)

    def _grow_for_drain(self, stack: Stack) -> None:
        # Without room for it there are no snapshots while one is being drained, and that one is complete.
        with contextlib.suppress(MemoryTooSmall, NotHeld):
            self.shelf.grow(stack, DRAIN_BUFFERS)

    # -- other keepers, and workers of other nodes -------------------------------------------------

    def op_replica_open(self, channel: Channel, message: Message) -> Message:
        """Another keeper will send copies; the table follows."""
        table = Table.decode(channel.receive_bytes(message["bytes"]))
        stack = self.shelf.open(message["gen"], message["owner"], table, replica=True, strict=True)
        threading.Thread(target=self._allocate, args=(stack,), name="allocate", daemon=True).start()
        return {}

    def _allocate(self, stack: Stack) -> None:
        try:
            while self.shelf.grow(stack, REPLICA_BUFFERS):
                pass
        except MemoryTooSmall as error:
            stack.trouble = str(error)  # told to the sender, who tells the controller
        except NotHeld:
            return

    def op_replica(self, channel: Channel, message: Message) -> Message:
        """Copies of one snapshot's slices: all digests, then all bytes."""
        stack = self.shelf.get(message["gen"], message["owner"], replica=True)
        if message["bytes"] != DIGEST_BYTES * len(stack.table.entries) + stack.table.nbytes:
            raise KeeperError(f"copies of {stack.owner} have another size than their table says")
        if not stack.receiving.acquire(timeout=RECEIVE_S):
            raise KeeperError(f"another copy of {stack.owner} is still arriving")
        try:
            buffer = room_for_copy(stack, message["complete"])
            digests = bytes(channel.receive_bytes(DIGEST_BYTES * len(stack.table.entries)))
            channel.receive_into(stack.buffers[buffer].data[: stack.table.nbytes])
            finish_replica(stack, buffer, message["step"], digests)
        finally:
            stack.receiving.release()
        return {}

    def op_fetch(self, channel: Channel, message: Message) -> None:
        """Parts [entry, first byte, bytes] of a snapshot: answers with their digests, then their bytes."""
        stack = self.shelf.get(message["gen"], message["owner"], replica=message["replica"])
        step = message["step"]
        buffer = stack.buffer_of(step)
        views: list[memoryview] = []
        for at, start, count in message["parts"]:
            self._verify(stack, buffer, step, at)
            views.append(stack.entry_view(buffer, at)[start : start + count])
        channel.send({}, [b"".join(map(digest, views)), *views])

    def op_verify(self, channel: Channel, message: Message) -> Message:
        """Check entries of a snapshot that a worker of this node is about to read by itself."""
        stack = self.shelf.get(message["gen"], message["owner"], replica=message["replica"])
        buffer = stack.buffer_of(message["step"])
        for at in message["entries"]:
            self._verify(stack, buffer, message["step"], at)
        return {}

    def _verify(self, stack: Stack, buffer: int, step: int, entry: int) -> None:
        key = (stack.generation, stack.owner, stack.replica, buffer, step, entry)
        with self._lock:
            if key in self._verified:
                return
        if not stack.intact(buffer, step, entry):
            self.shelf.drop(stack, buffer)
            self._tell({"t": "memory_damaged", "owner": stack.owner, "slice": str(stack.table.entries[entry])})
            raise NotHeld(f"{stack.table.entries[entry]} of step {step} in memory does not match its checksum")
        with self._lock:
            self._verified.add(key)

    # -- the controller ----------------------------------------------------------------------------

    def op_inventory(self, channel: Channel, message: Message) -> None:
        """All complete snapshots; the tables follow. Says, too, which keepers can take copies from now on."""
        self.op_ring(channel, message)
        with self._lock:
            self._verified.clear()  # what was sound at the last recovery may be damaged at this one
        holdings, tables = self.shelf.holdings()
        rows = [[h.owner, h.replica, h.generation, h.step, h.table, h.path] for h in holdings]
        names = [[name, len(table.encoded)] for name, table in tables.items()]
        channel.send({"holdings": rows, "tables": names}, [table.encoded for table in tables.values()])

    def op_ring(self, channel: Channel, message: Message) -> Message:
        """The keepers that can take copies from now on."""
        with self._lock:
            if message["as_of"] < self._ring_as_of:
                return {}
            self._ring_as_of = message["as_of"]
            self._ring = [KeeperAddress(node, host, port, self._token) for node, host, port in message["keepers"]]
            couriers = list(self._couriers.values())
        for courier in couriers:
            courier.ring_changed()
        return {}

    def op_forget(self, channel: Channel, message: Message) -> Message:
        """Drop what generations before ``below`` left, but of ``keep`` the state of ``step``."""
        self._forget(message["below"], message["keep"], message["step"])
        return {}

    def op_stat(self, channel: Channel, message: Message) -> Message:
        """Bytes in use and free."""
        return {"used": self.shelf.nbytes, "free": free_bytes(self._folder)}

    def _forget(self, below: int, keep: int | None, step: int | None) -> None:
        with self._lock:
            for key in [key for key in self._couriers if key[0] < below]:
                self._couriers.pop(key).stop()
            self._verified = {key for key in self._verified if key[0] >= below or key[0] == keep}
        self.shelf.forget(below, keep, step)


def _unpin(stack: Stack | None) -> None:
    """The worker may overwrite the buffer again."""
    page = None if stack is None else stack.page
    if page is not None:
        with contextlib.suppress(ValueError):  # given up meanwhile, and its page unmapped
            page.pinned = None


def _plain(message: Message) -> dict[str, Any]:
    return {key: message[key] for key in ("gen", "owner", "step", "token", "writer")}
