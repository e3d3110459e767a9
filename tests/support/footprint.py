"""What a process holds of the machine: memory, descriptors, threads, sockets."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

KIB = 1024


@dataclass(frozen=True)
class Footprint:
    """One look at one process."""

    anonymous: int
    """Bytes of memory of its own; what it shares with others and maps from files left out."""
    shared: int
    """Bytes of shared memory that it has mapped and touched."""
    opened: Counter[str]
    """Open descriptors by kind: socket, pipe, eventpoll, or the path of a file."""
    running: Counter[str]
    """Threads by name, numbers left out."""

    @property
    def descriptors(self) -> int:
        """How many descriptors are open."""
        return self.opened.total()

    @property
    def sockets(self) -> int:
        """How many of them are sockets."""
        return self.opened["socket"]

    @property
    def threads(self) -> int:
        """How many threads there are."""
        return self.running.total()

    def more_than(self, other: Footprint) -> str:
        """Which descriptors and threads are here that ``other`` lacks, for a person."""
        more = {"descriptors": self.opened - other.opened, "threads": self.running - other.running}
        texts = {
            name: ", ".join(f"{kind} +{count}" for kind, count in kinds.most_common(8)) for name, kinds in more.items()
        }
        return "; ".join(f"{name}: {text}" for name, text in texts.items() if text)


def footprint(pid: int) -> Footprint | None:
    """What ``pid`` holds now; None if it is gone."""
    folder = Path(f"/proc/{pid}")
    try:
        fields = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        return Footprint(
            anonymous=_kib(fields["RssAnon"]),
            shared=_kib(fields["RssShmem"]),
            opened=_each(folder / "fd", lambda entry: _kind(os.readlink(entry))),
            running=_each(folder / "task", lambda entry: re.sub(r"\d+", "", (entry / "comm").read_text().strip())),
        )
    except (OSError, KeyError):  # gone, or a zombie, which has no memory
        return None


def _each(folder: Path, name: Callable[[Path], str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for entry in os.listdir(folder):
        try:
            found[name(folder / entry)] += 1
        except OSError:  # closed or ended meanwhile
            continue
    return found


def _kind(target: str) -> str:
    """``socket:[123]`` -> socket, ``anon_inode:[eventpoll]`` -> eventpoll."""
    if target.startswith("anon_inode:"):
        return target.removeprefix("anon_inode:").strip("[]")
    return target.partition(":[")[0]


def _kib(text: str) -> int:
    return int(text.split()[0]) * KIB
