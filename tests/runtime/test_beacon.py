"""The line of liveness, over real sockets."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from planaria.runtime.beacon import KEPT, Beacon
from planaria.runtime.beacon_server import BeaconServer

LIMIT_S = 10.0


class Heard:
    """What a server was told, in order."""

    def __init__(self) -> None:
        self.messages: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()
        self.lost: queue.Queue[str] = queue.Queue()
        self.server = BeaconServer(
            "127.0.0.1", "secret", lambda ident, message: self.messages.put((ident, message)), self.lost.put
        )


@pytest.fixture
def heard() -> Iterator[Heard]:
    listener = Heard()
    yield listener
    listener.server.close()


def test_messages_and_the_end_of_a_process_are_heard(heard: Heard) -> None:
    beacon = Beacon(heard.server.address, "worker-0")
    beacon.send({"t": "ready"})
    assert heard.messages.get(timeout=LIMIT_S) == ("worker-0", {"t": "ready"})
    assert heard.server.silence("worker-0") is not None
    beacon.close()
    assert heard.lost.get(timeout=LIMIT_S) == "worker-0"
    assert heard.server.silence("worker-0") is None


@pytest.mark.parametrize(
    "greeting",
    [
        json.dumps({"ident": "worker-0"}).encode(),
        json.dumps({"token": "wrong", "ident": "worker-0"}).encode(),
        json.dumps({"token": "sécret", "ident": "worker-0"}).encode(),
        json.dumps({"token": "\ud800", "ident": "worker-0"}).encode(),
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_a_stranger_is_turned_away_and_disturbs_nobody(heard: Heard, greeting: bytes) -> None:
    address = (heard.server.address.host, heard.server.address.port)
    stranger = socket.create_connection(address, timeout=LIMIT_S)
    with stranger, contextlib.suppress(ConnectionError):  # a reset is a refusal, too
        stranger.sendall(greeting + b"\n")
        assert stranger.recv(1) == b""
    beacon = Beacon(heard.server.address, "worker-1")
    beacon.send({"t": "ready"})
    assert heard.messages.get(timeout=LIMIT_S) == ("worker-1", {"t": "ready"})
    beacon.close()
    assert heard.lost.get(timeout=LIMIT_S) == "worker-1"
    assert heard.lost.empty()


def test_a_process_that_was_given_up_is_told(heard: Heard) -> None:
    cut = threading.Event()
    beacon = Beacon(heard.server.address, "worker-0", 0.05, on_end=cut.set)
    other = Beacon(heard.server.address, "worker-1", 0.05)
    beacon.send({"t": "ready"})
    heard.messages.get(timeout=LIMIT_S)
    heard.server.cut("worker-0")
    assert heard.lost.get(timeout=LIMIT_S) == "worker-0"
    assert cut.wait(LIMIT_S)
    address = heard.server.address
    with socket.create_connection((address.host, address.port), timeout=LIMIT_S) as late:  # nor is it let in again
        late.sendall(json.dumps({"token": address.token, "ident": "worker-0"}).encode() + b"\n")
        assert late.recv(1) == b""
    other.send({"t": "ready"})
    assert heard.messages.get(timeout=LIMIT_S)[0] == "worker-1"
    other.close()
    beacon.close()


def drop(server: BeaconServer) -> None:
    """End a server as SIGKILL would: connections close, and nobody says farewell."""
    server._closing = True
    for key in list(server._selector.get_map().values()):
        if key.data is not None:
            server._selector.unregister(key.fileobj)
            key.data.connection.close()
    server.close()


def test_a_process_goes_on_without_its_controller_and_repeats_itself_to_the_one_that_returns(heard: Heard) -> None:
    ended = threading.Event()
    beacon = Beacon(heard.server.address, "worker-0", 0.05, lease_s=LIMIT_S, on_end=ended.set)
    beacon.send({"t": "step", "step": 0})
    beacon.send({"t": "phase", "phase": "data"})
    assert heard.messages.get(timeout=LIMIT_S)[1] == {"t": "step", "step": 0}
    drop(heard.server)
    beacon.send({"t": "step", "step": 1})
    returned = Heard()
    try:
        beacon.adopt(returned.server.address)
        beacon.send({"t": "step", "step": 2})
        steps = [returned.messages.get(timeout=LIMIT_S)[1]["step"] for _ in range(3)]
        assert steps == [0, 1, 2]  # and not the phase, which means nothing any more
        assert returned.messages.empty()
        assert not ended.is_set()
        beacon.close()
        assert returned.lost.get(timeout=LIMIT_S) == "worker-0"
    finally:
        returned.server.close()


def test_what_is_kept_for_a_controller_that_returns_is_bounded(heard: Heard) -> None:
    beacon = Beacon(heard.server.address, "worker-0", lease_s=LIMIT_S)
    for step in range(KEPT + 10):
        beacon.send({"t": "step", "step": step})
    returned = Heard()
    try:
        beacon.adopt(returned.server.address)
        first = returned.messages.get(timeout=LIMIT_S)[1]["step"]
        assert first == 10
        beacon.close()
    finally:
        returned.server.close()


def test_a_process_ends_when_no_controller_returns_within_its_lease(heard: Heard) -> None:
    ended = threading.Event()
    beacon = Beacon(heard.server.address, "worker-0", 0.05, lease_s=0.2, on_end=ended.set)
    drop(heard.server)
    assert ended.wait(LIMIT_S)
    beacon.close()


def test_a_process_ends_at_once_when_the_job_is_over(heard: Heard) -> None:
    ended = threading.Event()
    beacon = Beacon(heard.server.address, "worker-0", 0.05, lease_s=1000.0, on_end=ended.set)
    heard.server.close()
    assert ended.wait(LIMIT_S)
    beacon.close()
