"""A small HTTP server for Prometheus: ``/metrics``, ``/healthz`` and ``/sd``, in threads that nobody waits for.

A client that is slow, or says nothing, holds a thread for at most :data:`PATIENCE_S`; of more than :data:`CLIENTS` at
once the later ones are turned away.
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

PATIENCE_S = 5.0
CLIENTS = 16
TRIES = 10
"""Ports that are tried, from the one that was asked for on."""


class PortsTaken(OSError):
    """None of the ports can be had; the message says which were tried, and what to do."""


class MetricsServer:
    """Serves from its making until :meth:`close`, on ``host`` and, where that port is free, on the loopback: a
    Prometheus on the same machine needs not know under which address Ray has the node.

    Args:
        registry: what ``/metrics`` shows.
        run: the job's name, for ``/sd``.
        host: address of the interface to listen on.
        port: port to listen on; one of the next ones if it is taken; 0: any that is free.
        shown_as: address under which others reach ``host``, if another one.

    Raises:
        PortsTaken: no port is free.
        OSError: the address is not one of this machine.
    """

    def __init__(self, registry: CollectorRegistry, run: str, host: str, port: int, shown_as: str = "") -> None:
        first = _listen(host, port)
        self.port: int = first.server_address[1]
        self._servers = [first]
        with contextlib.suppress(OSError):  # taken: by this very server, if it listens everywhere
            self._servers.append(_Server("127.0.0.1", self.port))
        shown = shown_as or host
        self.address = f"[{shown}]:{self.port}" if ":" in shown else f"{shown}:{self.port}"
        for server in self._servers:
            server.registry = registry
            server.targets = [{"targets": [self.address], "labels": {"__meta_planaria_run": run}}]
            threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()

    def close(self) -> None:
        """Listen no more; answers that are under way are not waited for."""
        for server in self._servers:
            server.shutdown()
            server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = CLIENTS
    registry: CollectorRegistry
    targets: list[dict[str, Any]]

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._places = threading.BoundedSemaphore(CLIENTS)
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # Not HTTPServer's, which asks the name service for the host's name, and may wait for it.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, or a scrape that failed, is told to nobody: the client has seen it."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = PATIENCE_S
    server_version, sys_version = "planaria", ""

    def do_GET(self) -> None:
        answers: dict[str, Callable[[], tuple[str, bytes]]] = {
            "/metrics": self._metrics,
            "/healthz": lambda: ("text/plain; charset=utf-8", b"ok\n"),
            "/sd": lambda: ("application/json", json.dumps(self.server.targets).encode()),
        }
        answer = answers.get(self.path.partition("?")[0])
        if answer is None:
            self._send(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", f"there are {', '.join(answers)}\n".encode())
            return
        try:
            kind, body = answer()
        except Exception as error:  # whatever it is, the job goes on
            text = f"{type(error).__name__}: {error}\n".encode()
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain; charset=utf-8", text)
            return
        self._send(HTTPStatus.OK, kind, body)

    do_HEAD = do_GET

    def _metrics(self) -> tuple[str, bytes]:
        encode, kind = choose_encoder(self.headers.get("Accept", ""))
        return kind, encode(self.server.registry)

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing: a scrape a second would fill the log."""


def _listen(host: str, port: int) -> _Server:
    for at in range(port, min(port + (TRIES if port else 1), 1 << 16)):
        try:
            return _Server(host, at)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    last = min(port + TRIES, 1 << 16) - 1
    raise PortsTaken(f"ports {port} to {last} of {host} are taken; set metrics.port to one that is free, or 0 for any")
