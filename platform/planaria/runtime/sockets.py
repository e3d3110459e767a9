"""Telling a process's gloo connections apart, so that a broken collective can be interrupted.

Gloo in torch 2.13 has no abort: a rank that waits for a living peer waits for half an hour. Shutting the
receiving side of its connections down makes every wait return at once. Only connections that appeared while
a generation's groups were formed are touched; they are known by inode, since descriptor numbers are reused.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Callable

Address = tuple[str, int]
"""(host, port)."""


def socket_inodes() -> set[int]:
    """Inodes of every open socket of this process."""
    return {inode for _, inode in _open_sockets()}


def listening_ports(before: set[int]) -> set[int]:
    """Ports of this process's listening TCP sockets whose inode is not in ``before``."""
    ports: set[int] = set()
    for descriptor, inode in _open_sockets():
        if inode in before:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as duplicate:
            if _is_tcp(duplicate) and duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ports.add(duplicate.getsockname()[1])
    return ports


def _open_sockets() -> list[tuple[int, int]]:
    """(descriptor, inode) of every open socket, listed before the caller opens another."""
    found: list[tuple[int, int]] = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(entry))
        except OSError:
            continue  # closed since the listing, or the listing's own descriptor
        if stat.S_ISSOCK(status.st_mode):
            found.append((int(entry), status.st_ino))
    return found


def _is_tcp(connection: socket.socket) -> bool:
    return connection.family in (socket.AF_INET, socket.AF_INET6) and bool(connection.type & socket.SOCK_STREAM)


class ConnectionSet:
    """Duplicates of some of this process's connections; interruptible from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._closed = False

    def adopt(self, before: set[int], wanted: Callable[[Address, Address], bool]) -> None:
        """Duplicate the connected TCP sockets whose inode is not in ``before`` and whose (local, remote)
        addresses are ``wanted``. Other threads open connections too (Ray's): those must stay untouched."""
        with self._lock:
            if self._closed:
                return
            for descriptor, inode in _open_sockets():
                if inode not in before and (duplicate := _duplicate(descriptor, wanted)) is not None:
                    self._sockets.append(duplicate)

    def interrupt(self) -> int:
        """Shut the receiving side of every connection down; returns how many. Harmless after :meth:`close`."""
        with self._lock:
            for connection in self._sockets:
                # SHUT_RD only: with SHUT_RDWR a send pending in gloo's event loop is never told.
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RD)
            return len(self._sockets)

    def close(self) -> None:
        """Close the duplicates (a duplicate keeps the connection open for the peer)."""
        with self._lock:
            self._closed = True
            for connection in self._sockets:
                connection.close()
            self._sockets.clear()

    def __len__(self) -> int:
        return len(self._sockets)


def _duplicate(descriptor: int, wanted: Callable[[Address, Address], bool]) -> socket.socket | None:
    try:
        duplicate = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return None
    with contextlib.suppress(OSError):  # getpeername raises unless connected
        # Shutting a listener down aborts the process inside gloo.
        listens = duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if _is_tcp(duplicate) and not listens and wanted(duplicate.getsockname()[:2], duplicate.getpeername()[:2]):
            return duplicate
    duplicate.close()
    return None
