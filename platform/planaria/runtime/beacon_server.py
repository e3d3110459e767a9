"""The controller's end of the lines to its processes: who speaks, who fell silent, whose line broke.

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

from planaria.runtime.beacon import FAREWELL, WELCOME, BeaconAddress, Message

MAX_LINE = 1 << 24
"""Bytes of one message; a longer one closes the connection."""


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
        """The job is over: stop listening, tell everybody, and drop all connections."""
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
            if key.data is not None and key.data.ident:
                with contextlib.suppress(OSError):
                    key.data.connection.send(FAREWELL)
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
            if not peer.ident or peer.ident in self._cut:
                return False
            self._heard[peer.ident] = time.monotonic()
            with contextlib.suppress(OSError):
                peer.connection.send(WELCOME)
            return True
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
