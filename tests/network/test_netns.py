"""The faults of the network are real: what is cut is cut, and mended again."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from tests.support.netns import Network, require

SERVER = """
import socket
listener = socket.create_server(("", 7000))
while True:
    connection, _ = listener.accept()
    connection.sendall(connection.recv(1 << 20)[:1] * {answer})
    connection.close()
"""
CLIENT = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 7000), timeout=1)
connection.sendall(b"x")
size = 0
while data := connection.recv(1 << 20):
    size += len(data)
print(size)
"""
ANSWER = 1 << 20


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    require()
    with Network(3) as found:
        for host in (0, 2):
            command = [*found.prefix(host), sys.executable, "-c", SERVER.format(answer=ANSWER)]
            subprocess.Popen(command)  # ended with the network
        time.sleep(0.5)
        yield found


def _reaches(network: Network, source: int, target: int) -> bool:
    command = [*network.prefix(source), sys.executable, "-c", CLIENT, network.address(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode == 0 and int(done.stdout) == ANSWER


def test_a_pulled_cable_cuts_one_host_off_until_it_is_plugged_in_again(network: Network) -> None:
    assert _reaches(network, 1, 0)
    network.pull(1)
    assert not _reaches(network, 1, 0)
    assert _reaches(network, 2, 0)
    network.mend(1)
    assert _reaches(network, 1, 0)


def test_a_deafened_host_sends_but_hears_nothing(network: Network) -> None:
    network.deafen(1)
    before = int(network.on(1, "cat", "/sys/class/net/eth0/statistics/tx_packets"))
    assert not _reaches(network, 1, 0)
    assert int(network.on(1, "cat", "/sys/class/net/eth0/statistics/tx_packets")) > before
    network.mend(1)
    assert _reaches(network, 1, 0)


def test_a_lossy_link_drops_about_what_was_asked_for(network: Network) -> None:
    before = _received(network, 1)
    network.lose(1, 0.05)
    for _ in range(10):
        _reaches(network, 1, 2)
    rows = [line.split() for line in network.on(1, "iptables", "-nvxL", "INPUT").splitlines() if "DROP" in line]
    dropped, arrived = sum(int(row[0]) for row in rows), _received(network, 1) - before
    network.mend(1)
    assert 0.01 < dropped / arrived < 0.15


def _received(network: Network, host: int) -> int:
    return int(network.on(host, "cat", "/sys/class/net/eth0/statistics/rx_packets"))


def test_a_shaped_link_has_its_rate(network: Network) -> None:
    network.shape(1, "10mbit")
    began = time.monotonic()
    assert _reaches(network, 1, 0)
    took = time.monotonic() - began
    network.mend(1)
    assert took > 0.7 * 8 * ANSWER / 10e6


def test_closing_ends_the_processes_and_the_namespaces() -> None:
    require()

    def spaces() -> str:
        return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout

    before = spaces()
    with Network(1) as network:
        process = subprocess.Popen([*network.prefix(0), sys.executable, "-c", "import time; time.sleep(600)"])
        while process.pid not in network.pids(0):
            time.sleep(0.05)
        assert spaces() != before
    assert process.wait(5) == -9
    assert spaces() == before
