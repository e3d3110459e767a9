"""Messages between keepers, workers and the controller: a JSON head, then raw bytes, over TCP.

Bytes go from memory to socket and from socket to memory without a copy in between. The first message of a
connection holds the run's secret; whoever does not know it is cut off.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from planaria.memory.buffers import MemoryTooSmall

Message = dict[str, Any]
Bytes = bytes | bytearray | memoryview
_LENGTH = struct.Struct(">I")
MAX_HEAD = 1 << 28
MAX_GREETING = 1 << 10
CONNECT_S = 5.0
"""Longest wait for a connection: keepers are near, and one that does not answer must not hold others up."""
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""Who waits for a machine that vanished without a word learns of it in about 25 s."""
_PARTS = 512
"""Buffers handed to one ``sendmsg``; the kernel's limit is 1024."""


class KeeperError(RuntimeError):
    """A keeper refused a request, or the connection to it broke."""


class PeerGone(KeeperError):
    """The connection to the other side broke."""


@dataclass(frozen=True)
class KeeperAddress:
    """Where a keeper listens, and the secret that admits a process of this run."""

    node: str
    host: str
    port: int
    token: str


class Channel:
    """One connection; used by one thread at a time. Raises :class:`PeerGone` where it breaks."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self.left = 0
        """Raw bytes of the last message that are still on the line."""

    def send(self, message: Message, payload: Sequence[Bytes] = ()) -> None:
        """Send a message and the bytes that belong to it."""
        total = sum(len(part) for part in payload)
        head = json.dumps(message | {"bytes": total} if payload else message, separators=(",", ":")).encode()
        try:
            send_all(self._socket, [_LENGTH.pack(len(head)) + head, *payload])
        except OSError as error:
            raise PeerGone(str(error)) from error

    def receive(self, limit: int = MAX_HEAD) -> Message | None:
        """The next message; None if the peer has closed the connection."""
        prefix = bytearray(_LENGTH.size)
        if not self._fill(memoryview(prefix), ending=True):
            return None
        (length,) = _LENGTH.unpack(prefix)
        if length > limit:
            raise KeeperError(f"a message of {length} bytes is longer than {limit}")
        head = bytearray(length)
        self._fill(memoryview(head))
        try:
            message = json.loads(head)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise KeeperError("a message that is no JSON object")
        count = message.get("bytes", 0)
        if not isinstance(count, int) or count < 0:
            raise KeeperError(f"a message with {count!r} bytes")
        self.left = count
        return message

    def receive_into(self, view: memoryview) -> None:
        """Fill ``view`` with raw bytes of the last message."""
        if len(view) > self.left:
            raise KeeperError(f"{len(view)} bytes expected, the message has only {self.left} left")
        self.left -= len(view)
        self._fill(view)

    def receive_bytes(self, count: int) -> bytearray:
        """The next ``count`` raw bytes of the last message."""
        raw = bytearray(min(count, self.left + 1))
        self.receive_into(memoryview(raw))
        return raw

    def skip(self) -> None:
        """Take the raw bytes that nobody wants from the line."""
        scrap = memoryview(bytearray(min(self.left, 1 << 20)))
        while self.left:
            self.receive_into(scrap[: min(self.left, len(scrap))])

    def _fill(self, view: memoryview, *, ending: bool = False) -> bool:
        """Fill ``view``; False if the peer closed before the first byte and ``ending`` allows it."""
        done = 0
        while done < len(view):
            try:
                count = self._socket.recv_into(view[done:])
            except OSError as error:
                raise PeerGone(str(error)) from error
            if count == 0:
                if ending and done == 0:
                    return False
                raise PeerGone("the connection was closed")
            done += count
        return True

    def limit(self, timeout_s: float | None) -> None:
        """Longest silence of the peer from now on."""
        self._socket.settimeout(timeout_s)

    def cut(self) -> None:
        """From any thread: whoever uses the channel learns at once that it is broken."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection."""
        self._socket.close()


class KeeperLink:
    """The client's end of a connection to a keeper."""

    def __init__(self, address: KeeperAddress, timeout_s: float = 30.0) -> None:
        self.address = address
        try:
            connection = socket.create_connection((address.host, address.port), timeout=min(timeout_s, CONNECT_S))
        except OSError as error:
            raise PeerGone(f"the keeper of node {address.node[:8]} cannot be reached: {error}") from error
        connection.settimeout(timeout_s)
        self.channel = Channel(connection)
        try:
            self.tell({"op": "hello", "token": address.token})
        except PeerGone:
            self.close()
            raise

    def tell(self, message: Message, payload: Sequence[Bytes] = ()) -> None:
        """Send a message that has no answer."""
        try:
            self.channel.send(message, payload)
        except PeerGone as error:
            raise self._gone(error) from error

    def call(self, message: Message, payload: Sequence[Bytes] = ()) -> Message:
        """Send a message and wait for its answer, whose raw bytes may follow on the channel.

        Raises:
            KeeperError: it refused, or is gone (:class:`PeerGone`).
            MemoryTooSmall: it has not the memory.
        """
        self.tell(message, payload)
        try:
            answer = self.channel.receive()
        except PeerGone as error:
            raise self._gone(error) from error
        if answer is None:
            raise self._gone("it has closed the connection")
        if "error" in answer:
            kind = MemoryTooSmall if answer.get("kind") == MemoryTooSmall.__name__ else KeeperError
            raise kind(f"node {self.address.node[:8]}: {answer['error']}")
        return answer

    def _gone(self, why: object) -> PeerGone:
        return PeerGone(f"the keeper of node {self.address.node[:8]} is gone: {why}")

    def close(self) -> None:
        """End the connection."""
        self.channel.close()


def admitted(channel: Channel, token: str) -> bool:
    """Whether the peer's first message holds the run's secret."""
    greeting = channel.receive(MAX_GREETING)
    return greeting is not None and hmac.compare_digest(str(greeting.get("token")).encode(), token.encode())


def send_all(connection: socket.socket, parts: Sequence[Bytes]) -> None:
    """Send all bytes of ``parts``, in order."""
    waiting = [view for part in parts if len(view := memoryview(part).cast("B"))]
    while waiting:
        sent = connection.sendmsg(waiting[:_PARTS])
        done = 0
        while done < len(waiting) and sent >= len(waiting[done]):
            sent -= len(waiting[done])
            done += 1
        waiting = waiting[done:]
        if sent:
            waiting[0] = waiting[0][sent:]
