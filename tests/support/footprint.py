"""What a process holds of the machine: memory, descriptors, threads, sockets."""

from __future__ import annotations

import os
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
    descriptors: int
    sockets: int
    threads: int


def footprint(pid: int) -> Footprint | None:
    """What ``pid`` holds now; None if it is gone."""
    folder = Path(f"/proc/{pid}")
    try:
        fields = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        names = []
        for name in os.listdir(folder / "fd"):
            try:
                names.append(os.readlink(folder / "fd" / name))
            except OSError:  # closed meanwhile
                continue
        return Footprint(
            anonymous=_kib(fields["RssAnon"]),
            shared=_kib(fields["RssShmem"]),
            descriptors=len(names),
            sockets=sum(1 for name in names if name.startswith("socket:")),
            threads=int(fields["Threads"]),
        )
    except (OSError, KeyError):  # gone, or a zombie, which has no memory
        return None


def _kib(text: str) -> int:
    return int(text.split()[0]) * KIB
