"""Energy meters of a node: what the processors' own counters say, where the kernel shows them."""

from __future__ import annotations

import contextlib
from pathlib import Path

ROOT = Path("/sys/class/powercap")
JOULE = 1_000_000
"""Microjoules."""


class Energy:
    """Joules since its making, by meter (``intel-rapl:0`` and so on: one per socket).

    The kernel's counters begin anew at a limit of their own, within minutes to hours: read more often than that. Many
    kernels show them to root alone; a meter that cannot be read is no meter.
    """

    def __init__(self, root: Path = ROOT) -> None:
        self._meters: dict[str, tuple[Path, int]] = {}
        self._before: dict[str, int] = {}
        self._total: dict[str, int] = {}
        # Sockets alone, "intel-rapl:0": what lies below ("intel-rapl:0:1") is in them.
        for folder in sorted(root.glob("intel-rapl:*")):
            with contextlib.suppress(OSError, ValueError):
                if folder.name.count(":") == 1:
                    now = _number(folder / "energy_uj")
                    self._meters[folder.name] = folder / "energy_uj", _number(folder / "max_energy_range_uj")
                    self._before[folder.name], self._total[folder.name] = now, 0

    def read(self) -> dict[str, float]:
        """Joules by meter; empty where there is none."""
        for name, (file, limit) in self._meters.items():
            with contextlib.suppress(OSError, ValueError):
                now = _number(file)
                used = now - self._before[name]
                self._total[name] += used if used >= 0 else used + limit + 1
                self._before[name] = now
        return {name: total / JOULE for name, total in self._total.items()}


def _number(file: Path) -> int:
    return int(file.read_text())
