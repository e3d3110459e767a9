"""A small network of hosts on this machine: a namespace each, joined by a switch, with cables that can be pulled."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import pytest

PREFIX = "10.77.0."
_networks = itertools.count()


def require() -> None:
    """Skip the test where this machine cannot do it."""
    if os.geteuid():
        pytest.skip("network namespaces need root")
    missing = [name for name in ("ip", "tc", "iptables") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"missing: {', '.join(missing)} (Debian: apt-get install iproute2 iptables)")
    probe = f"plp{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"network namespaces are not permitted here: {made.stderr.strip()}")
    bridged = _in(probe, "ip", "link", "add", "br0", "type", "bridge", check=False)
    _ip("netns", "del", probe)
    if bridged.returncode:
        pytest.skip(f"this kernel has no bridges: {bridged.stderr.strip()}")


class Network:
    """Hosts ``0 .. hosts - 1``, each in a namespace with an interface ``eth0``, on one switch.

    Nothing of it is visible in the namespace of the tests. :meth:`close` ends every process on its hosts.
    """

    def __init__(self, hosts: int) -> None:
        self._name = f"pl{os.getpid()}.{next(_networks)}"
        self._spaces: list[str] = []
        try:
            self._space("switch")
            self._switch("ip", "link", "add", "br0", "type", "bridge")
            self._switch("ip", "link", "set", "br0", "up")
            for host in range(hosts):
                self._connect(host)
        except BaseException:
            self.close()
            raise

    def address(self, host: int) -> str:
        """IP address of a host."""
        return f"{PREFIX}{host + 1}"

    def prefix(self, host: int) -> list[str]:
        """What a command must begin with to run on ``host``."""
        return ["ip", "netns", "exec", f"{self._name}-{host}"]

    def pull(self, host: int) -> None:
        """Pull the cable of a host: the link is down on both ends, packets vanish, nobody is told."""
        self._switch("ip", "link", "set", f"port{host}", "down")

    def plug(self, host: int) -> None:
        """Put the cable back in."""
        self._switch("ip", "link", "set", f"port{host}", "up")

    def deafen(self, host: int) -> None:
        """One-way fault: nothing arrives at ``host``, though all that it sends gets out."""
        self.on(host, "iptables", "-A", "INPUT", "-i", "eth0", "-j", "DROP")

    def lose(self, host: int, share: float) -> None:
        """Drop a random ``share`` of the packets that arrive at ``host`` or leave it."""
        chance = ["-m", "statistic", "--mode", "random", "--probability", str(share), "-j", "DROP"]
        self.on(host, "iptables", "-A", "INPUT", "-i", "eth0", *chance)
        self.on(host, "iptables", "-A", "OUTPUT", "-o", "eth0", *chance)

    def shape(self, host: int, rate: str) -> None:
        """Limit both directions of a host's link to ``rate`` as tc spells it, e.g. ``10mbit``."""
        bucket = ["root", "tbf", "rate", rate, "burst", "32kbit", "latency", "200ms"]
        self.on(host, "tc", "qdisc", "replace", "dev", "eth0", *bucket)
        self._switch("tc", "qdisc", "replace", "dev", f"port{host}", *bucket)

    def mend(self, host: int) -> None:
        """Undo all faults of a host."""
        self.plug(host)
        self.on(host, "iptables", "-F")
        _in(f"{self._name}-{host}", "tc", "qdisc", "del", "dev", "eth0", "root", check=False)
        _in(f"{self._name}-switch", "tc", "qdisc", "del", "dev", f"port{host}", "root", check=False)

    def on(self, host: int, *command: str) -> str:
        """Run a command on a host, and return what it prints."""
        return _in(f"{self._name}-{host}", *command).stdout

    def pids(self, host: int) -> list[int]:
        """Processes that run on a host."""
        return _pids(f"{self._name}-{host}")

    def kill(self, host: int) -> None:
        """End all processes of a host."""
        _end(f"{self._name}-{host}")

    def close(self) -> None:
        """End every process of the network, and take it down."""
        for space in self._spaces:
            _end(space)
        for space in self._spaces:
            _ip("netns", "del", space)
        self._spaces.clear()

    def _space(self, name: str) -> str:
        space = f"{self._name}-{name}"
        _ip("netns", "add", space)
        self._spaces.append(space)
        _in(space, "ip", "link", "set", "lo", "up")
        return space

    def _connect(self, host: int) -> None:
        space, switch = self._space(str(host)), f"{self._name}-switch"
        _in(space, "ip", "link", "add", "eth0", "type", "veth", "peer", "name", f"port{host}", "netns", switch)
        self._switch("ip", "link", "set", f"port{host}", "master", "br0", "up")
        _in(space, "ip", "address", "add", f"{self.address(host)}/24", "dev", "eth0")
        _in(space, "ip", "link", "set", "eth0", "up")
        # Programs learn their own address by asking for the way to the world; nothing is ever sent there.
        _in(space, "ip", "route", "add", "default", "dev", "eth0")
        # Names are not to be resolved: a look-up fails at once, and not after the resolver's seconds of patience.
        for server in _name_servers():
            _in(space, "ip", "route", "add", "unreachable", server)

    def _switch(self, *command: str) -> None:
        _in(f"{self._name}-switch", *command)

    def __enter__(self) -> Network:
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _name_servers() -> list[str]:
    lines = Path("/etc/resolv.conf").read_text().splitlines() if Path("/etc/resolv.conf").exists() else []
    servers = [line.split()[1] for line in lines if line.startswith("nameserver ")]
    return [name for name in servers if name.count(".") == 3 and not name.startswith("127.")]


def _in(space: str, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", "netns", "exec", space, *command], check=check, capture_output=True, text=True)


def _ip(*command: str) -> None:
    subprocess.run(["ip", *command], check=True, capture_output=True, text=True)


def _pids(space: str) -> list[int]:
    listed = subprocess.run(["ip", "netns", "pids", space], check=True, capture_output=True, text=True)
    return [int(line) for line in listed.stdout.split()]


def _end(space: str, limit_s: float = 10) -> None:
    deadline = time.monotonic() + limit_s
    while pids := _pids(space):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{space}: processes {pids} do not end")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


__all__: Sequence[str] = ("Network", "require")
