"""A process's line to the controller: liveness, heartbeats and reports.

The process outlives its controller. A line that breaks has one of two reasons: the controller has given this process
up (then it still listens, and turns the process away: it ends), or the controller is gone (then nobody listens: the
process goes on with its work and waits, for the length of its lease, for the controller that returns to
:meth:`Beacon.adopt` it). What it had to say is then said again, since nobody knows what was heard.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
WELCOME = b"welcome\n"
"""Answer to a greeting that admits the process; whoever is not admitted is cut off instead."""
FAREWELL = b"farewell\n"
"""Sent when the job is over: nobody will return."""
FLEETING = frozenset({"phase", "memory"})
"""Messages that mean nothing to a controller that returns."""
KEPT = 1000
"""Messages that are said again to a controller that returns: more than a job produces while one comes back."""
GREET_S = 2.0
CONNECT_S = 30.0


@dataclass(frozen=True)
class BeaconAddress:
    """Where the controller listens, and the secret that admits a process of this run."""

    host: str
    port: int
    token: str


class TurnedAway(ConnectionError):
    """The controller lives and does not want this process."""


class Beacon:
    """One process's line. :meth:`send` and :meth:`adopt` from any thread; neither waits for the network.

    Args:
        address: the controller's.
        ident: the name of this process.
        interval_s: seconds between two heartbeats.
        lease_s: how long to go on without a controller.
        on_end: called, once, when this process has nobody to work for any more.

    Raises:
        OSError: the controller cannot be reached, or turns this process away.
    """

    def __init__(
        self,
        address: BeaconAddress,
        ident: str,
        interval_s: float = 0.5,
        lease_s: float = 60.0,
        on_end: Callable[[], None] = lambda: os._exit(1),
    ) -> None:
        self._ident, self._interval, self._lease, self._on_end = ident, interval_s, lease_s, on_end
        self._address = address
        self._next: BeaconAddress | None = None
        self._outbox: deque[bytes] = deque()
        self._recent: deque[bytes] = deque(maxlen=KEPT)
        self._wake = threading.Condition()
        self._closed = False
        self._connection = _greet(address, ident, CONNECT_S)
        self._thread = threading.Thread(target=self._run, name="beacon", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Have one JSON-able message sent, after all that came before it."""
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        with self._wake:
            self._outbox.append(line)
            if message.get("t") not in FLEETING:
                self._recent.append(line)
            self._wake.notify()

    def adopt(self, address: BeaconAddress) -> None:
        """Speak to the controller at ``address`` from now on."""
        with self._wake:
            self._next = address
            self._wake.notify()

    def close(self) -> None:
        """Say what is still to be said, and end the line; the controller sees this process as gone."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(GREET_S)
        self._connection.close()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(self._has_work, self._interval)
                address, self._next = self._next, None
                lines = list(self._recent if address else self._outbox)
                self._outbox.clear()
                closed = self._closed
            try:
                if address is not None:
                    self._connection.close()
                    self._connection, self._address = _greet(address, self._ident, GREET_S), address
                self._look()
                self._connection.sendall(b"".join(lines) or b"{}\n")
            except TurnedAway:
                self._end()
                return
            except OSError:
                if not closed and not self._await_another():
                    self._end()
                    return
            if closed:
                return

    def _has_work(self) -> bool:
        return bool(self._outbox or self._next or self._closed)

    def _look(self) -> None:
        """Notice an end of the line that no write has noticed yet."""
        if select.select([self._connection], [], [], 0)[0]:
            word = self._connection.recv(1 << 10)
            if word.endswith(FAREWELL):
                raise TurnedAway("the job is over")
            if not word:
                raise ConnectionResetError("the controller closed the line")

    def _await_another(self) -> bool:
        """The line is broken: whether there is somebody to speak to again."""
        self._connection.close()
        try:
            # Once more, should the line alone have failed; what was said may have been lost.
            self._connection = _greet(self._address, self._ident, GREET_S)
        except TurnedAway:
            return False
        except OSError:
            with self._wake:
                self._wake.wait_for(lambda: self._next is not None or self._closed, self._lease)
                return self._next is not None or self._closed
        with self._wake:
            self._outbox = deque(self._recent)
        return True

    def _end(self) -> None:
        with self._wake:
            closed, self._closed = self._closed, True
        if not closed:
            self._on_end()


def _greet(address: BeaconAddress, ident: str, timeout_s: float) -> socket.socket:
    """A line on which the controller has bidden ``ident`` welcome."""
    connection = socket.create_connection((address.host, address.port), timeout=timeout_s)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(json.dumps({"token": address.token, "ident": ident}).encode() + b"\n")
        answer = b""
        while len(answer) < len(WELCOME):
            more = connection.recv(len(WELCOME) - len(answer))
            if not more:
                raise TurnedAway(f"{address.host}:{address.port} turned {ident} away")
            answer += more
    except BaseException:
        with contextlib.suppress(OSError):
            connection.close()
        raise
    # A controller that takes nothing for this long counts as gone.
    connection.settimeout(timeout_s if timeout_s > GREET_S else CONNECT_S)
    return connection
