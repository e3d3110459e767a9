"""The line between a worker process and the controller: liveness, heartbeats and step reports.

One TCP connection per process, newline-separated JSON. The kernel closes it when the process dies, however
it dies, so the controller learns of a SIGKILL within milliseconds, long before Ray's node-death time-outs.
A machine that vanishes without closing anything is found by its silence.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
MAX_LINE = 1 << 24
"""Bytes of one message; a longer one closes the connection."""


@dataclass(frozen=True)
class BeaconAddress:
    """Where the controller listens, and the secret that admits a process of this run."""

    host: str
    port: int
    token: str


@dataclass
class _Peer:
    connection: socket.socket
    ident: str = ""
    buffer: bytes = b""
    heard: float = 0.0


class BeaconServer:
    """Listens on ``host`` (one interface, a free port); calls back from its own thread.

    ``on_message(ident, message)`` for every message after the greeting, ``on_lost(ident)`` once when the
    connection of a process ends.
    """

    def __init__(
        self, host: str, token: str, on_message: Callable[[str, Message], None], on_lost: Callable[[str], None]
    ) -> None:
        self._token, self._on_message, self._on_lost = token, on_message, on_lost
        self._listener = socket.create_server((host, 0))
        self._listener.setblocking(False)
        self.address = BeaconAddress(host, self._listener.getsockname()[1], token)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake_in, self._wake_out = socket.socketpair()
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._heard: dict[str, float] = {}
        self._cut: set[str] = set()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="beacon-server", daemon=True)
        self._thread.start()

    def silence(self, ident: str) -> float | None:
        """Seconds since the last word of ``ident``; None if it never spoke or its connection ended."""
        heard = self._heard.get(ident)
        return None if heard is None else time.monotonic() - heard

    def cut(self, ident: str) -> None:
        """End the connection of ``ident``, whose process then ends itself: it was given up, and must not go on
        should it come back. Its words count no more."""
        self._cut.add(ident)
        with contextlib.suppress(OSError):
            self._wake_out.send(b"x")

    def close(self) -> None:
        """Stop listening and drop all connections."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._wake_out.send(b"x")
        self._thread.join(5)

    def _serve(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data is not None:
                    self._receive(key.data)
                else:
                    self._wake_in.recv(1 << 10)
                    self._end_cut()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        self._wake_out.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, _Peer(connection))

    def _receive(self, peer: _Peer) -> None:
        try:
            data = peer.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(peer)
            return
        *lines, peer.buffer = (peer.buffer + data).split(b"\n")
        if len(peer.buffer) > MAX_LINE:
            self._drop(peer)
            return
        for line in lines:
            if not self._handle(peer, line):
                self._drop(peer)
                return

    def _handle(self, peer: _Peer, line: bytes) -> bool:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return False
        if not isinstance(message, dict):
            return False
        if not peer.ident:
            if not hmac.compare_digest(repr(message.get("token")).encode(), repr(self._token).encode()):
                return False
            peer.ident = str(message.get("ident", ""))
            self._heard[peer.ident] = time.monotonic()
            return bool(peer.ident) and peer.ident not in self._cut
        self._heard[peer.ident] = time.monotonic()
        if message:
            self._on_message(peer.ident, message)
        return True

    def _end_cut(self) -> None:
        peers = [key.data for key in self._selector.get_map().values() if key.data is not None]
        for peer in peers:
            if peer.ident in self._cut:
                self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        if peer.connection.fileno() < 0:  # cut in the same round
            return
        self._selector.unregister(peer.connection)
        peer.connection.close()
        if peer.ident:
            self._heard.pop(peer.ident, None)
            self._on_lost(peer.ident)


class Beacon:
    """The worker's end. :meth:`send` from any thread; a heartbeat goes out every ``interval_s`` on its own."""

    def __init__(
        self,
        address: BeaconAddress,
        ident: str,
        interval_s: float = 0.5,
        on_cut: Callable[[], None] = lambda: None,
    ) -> None:
        self._connection = socket.create_connection((address.host, address.port), timeout=30)
        self._lock = threading.Lock()
        self._interval, self._on_cut = interval_s, on_cut
        self._closed = threading.Event()
        self._write({"token": address.token, "ident": ident})
        threading.Thread(target=self._beat, name="beacon", daemon=True).start()

    def send(self, message: Message) -> None:
        """Send one JSON-able message; silently dropped if the line is cut (``on_cut`` is then called)."""
        with contextlib.suppress(OSError):
            self._write(message)

    def close(self) -> None:
        """End the connection; the controller sees this process as gone."""
        self._closed.set()
        self._connection.close()

    def _write(self, message: Message) -> None:
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            self._connection.sendall(line)

    def _beat(self) -> None:
        while not self._closed.wait(self._interval):
            try:
                self._write({})
            except OSError:
                if not self._closed.is_set():
                    self._on_cut()
                return
