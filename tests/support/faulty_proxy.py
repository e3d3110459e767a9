"""A proxy between an S3 client and its store that does what networks and stores do: one HTTP exchange, one fault.

It reads each request of a client as a whole, asks the list of faults what to do with it, and passes it on or not.
Hosts in requests stay untouched, so signatures remain valid. One thread per connection; :meth:`close` ends all.
"""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
PIECE = 64 << 10


@dataclass
class Fault:
    """What happens to matching requests.

    Attributes:
        kind: ``status`` answers with ``status`` and ``code`` in place of the store; ``reset`` cuts the connection
            after ``after`` bytes of the answer (0: before it), with a TCP reset; ``short`` likewise, with an orderly
            end; ``stall`` passes ``after`` bytes of the answer, then no more; ``lose`` lets the store do it
            and cuts the connection instead of answering; ``cut`` resets after ``after`` bytes of the *request*.
        match: regular expression for the request line, such as ``PUT .*manifest``.
        times: how many requests it hits; the next one passes.
    """

    kind: str
    match: str = ""
    times: int = 1
    status: int = 503
    code: str = "SlowDown"
    after: int = 0
    hits: int = 0


@dataclass
class FaultyProxy:
    """Listens on a free port of 127.0.0.1 and passes everything to ``target`` (``http://host:port``).

    Attributes:
        faults: the first one that matches a request and is not used up strikes.
        seen: request lines, in order.
        delay: called with each request line before it is passed on, to arrange a meeting of two requests.
    """

    target: str
    faults: list[Fault] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    delay: Callable[[str], None] = lambda line: None

    def __post_init__(self) -> None:
        self._lock, self._open = threading.Lock(), set[socket.socket]()
        self._closing = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        """End all connections and threads."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), self._kept(client):
            while self._exchange(client):
                pass

    @contextlib.contextmanager
    def _kept(self, connection: socket.socket) -> Iterator[None]:
        with self._lock:
            self._open.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _exchange(self, client: socket.socket) -> bool:
        """One request and its answer; whether the connection goes on."""
        head, body = _read_head(client)
        if not head:
            return False
        line = head.partition(b"\r\n")[0].decode("latin-1")
        with self._lock:
            self.seen.append(line)
            fault = next((f for f in self.faults if f.hits < f.times and re.search(f.match, line)), None)
            if fault:
                fault.hits += 1
        self.delay(line)
        kind, after = (fault.kind, fault.after) if fault else ("", 0)
        if b"100-continue" in head.lower():
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            head = re.sub(rb"\r\nexpect: *100-continue", b"", head, flags=re.IGNORECASE)
        if kind == "cut":
            _read(client, min(after, _length(head)) - len(body))
            _reset(client)
            return False
        body += _read(client, _length(head) - len(body))
        if fault and kind == "status":
            client.sendall(_refusal(fault))
            return True
        answer, content = self._ask(head, body)
        if kind == "lose" or not answer:
            _reset(client)
            return False
        if not kind:
            client.sendall(answer + content)
            return True
        client.sendall(answer + content[:after] if after else b"")
        if kind == "stall":
            self._closing.wait()
        elif kind == "reset":
            _reset(client)
        return False

    def _ask(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        """The store's answer: its head, with the length of its content, and that content."""
        host, _, port = self.target.removeprefix("http://").partition(":")
        # HTTP/1.0: the store neither cuts its answer into chunks nor keeps the connection.
        head = head.replace(b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", 1)
        with socket.create_connection((host, int(port))) as store, self._kept(store):
            store.sendall(head + body)
            answer, content = _read_head(store)
            while piece := store.recv(PIECE):
                content += piece
        if b"content-length:" not in answer.lower():
            answer = answer[:-2] + f"Content-Length: {len(content)}\r\n\r\n".encode()
        answer = re.sub(rb"\r\nconnection: *close", b"", answer, flags=re.IGNORECASE)
        return answer.replace(b"HTTP/1.0", b"HTTP/1.1", 1), content


def _read_head(connection: socket.socket) -> tuple[bytes, bytes]:
    """Request or status line with all headers, and what came of the body; empty at the end of the connection."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(PIECE)
        if not piece:
            return b"", b""
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    return head + b"\r\n\r\n", body


def _read(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(min(PIECE, count - len(data)))
        if not piece:
            break
        data += piece
    return bytes(data)


def _length(head: bytes) -> int:
    match = _LENGTH.search(head)
    return int(match[1]) if match else 0


def _refusal(fault: Fault) -> bytes:
    body = f"<Error><Code>{fault.code}</Code><Message>said the proxy</Message></Error>".encode()
    head = f"HTTP/1.1 {fault.status} Fault\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _reset(connection: socket.socket) -> None:
    """End with RST in place of FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
