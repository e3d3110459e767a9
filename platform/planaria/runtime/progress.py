"""Where a rank is, in one word: generation, step, phase, micro-batch.

Training changes the word for every phase and micro-batch, which costs an assignment. A thread of its own looks at it
twice a second and tells the controller when it has changed. So a rank that is stuck has told where within
:data:`EVERY_S`, and a step that is over sooner costs no message at all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

EVERY_S = 0.5

BEFORE = ("forming", "building", "restoring")
"""What comes before the first step, in order."""
WITHIN = ("data", "agree", "step", "reduce", "update", "keep", "checkpoint", "evaluate")
"""What a step consists of, in order. In ``agree`` and ``reduce`` a rank waits for its peers, with sharded parameters
or tensor parallelism in ``step``, too; ``data`` waits for loaders, ``checkpoint`` for memory and storage."""

AT_ONCE = frozenset({"checkpoint", "evaluate"})
"""Phases whose begin is told at once: they are rare, and whoever accounts for time wants to know."""


@dataclass(frozen=True, order=True)
class Place:
    """Where a rank is; the smallest place of a generation is that of whoever is behind.

    Compared as a rank gets ahead: first whether it trains at all, then its step, the phase, the micro-batch.
    """

    begun: bool
    """Whether it trains, or still forms, builds or restores."""
    step: int
    """Steps done."""
    stage: int
    """Position of the phase in its order."""
    micro: int
    """Micro-batches done in ``step`` and ``evaluate``."""
    phase: str = field(compare=False)

    @classmethod
    def of(cls, step: int, phase: str, micro: int = 0) -> Place:
        """The place of a phase.

        Raises:
            ValueError: there is no such phase.
        """
        if phase in BEFORE:
            return cls(False, step, BEFORE.index(phase), micro, phase)
        if phase in WITHIN:
            return cls(True, step, WITHIN.index(phase), micro, phase)
        raise ValueError(f"no phase {phase!r}; phases are {', '.join(BEFORE + WITHIN)}")

    @classmethod
    def read(cls, message: dict[str, Any]) -> Place:
        """From a message that :class:`Progress` sent; an unknown phase or a missing key is a ValueError or KeyError."""
        return cls.of(message["step"], message["phase"], message.get("micro", 0))

    def __str__(self) -> str:
        return f"step {self.step}, {self.phase}" + (f", micro-batch {self.micro}" if self.phase == "step" else "")


class Progress:
    """Tells where this rank is, from its start to :meth:`close`.

    Args:
        say: tells the controller; called from the thread that looks, too.
        step: steps done in the state to start from.
        every_s: how often to look.
    """

    def __init__(self, say: Callable[[dict[str, Any]], None], step: int = 0, every_s: float = EVERY_S) -> None:
        self._say, self._every = say, every_s
        self._word: tuple[int, str, int, float] = (step, "forming", 0, time.monotonic())
        self._told: tuple[int, str, int, float] | None = None
        self._telling = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)
        self._thread.start()

    def at(self, step: int, phase: str, micro: int = 0) -> None:
        """This rank has come so far."""
        begins = phase in AT_ONCE and phase != self._word[1]
        self._word = (step, phase, micro, time.monotonic())
        if begins:
            self._tell()

    def where(self) -> tuple[Place, float]:
        """(place, seconds since this rank came there)."""
        step, phase, micro, since = self._word
        return Place.of(step, phase, micro), time.monotonic() - since

    def close(self) -> None:
        """Say nothing any more."""
        self._closed.set()
        self._thread.join(1.0)  # not for ever: it may be sending to a controller that is cut off

    def _watch(self) -> None:
        while not self._closed.wait(self._every):
            self._tell()

    def _tell(self) -> None:
        with self._telling:  # so that no older word comes after a newer one
            word = self._word
            if word is self._told:
                return
            self._told = word
            step, phase, micro, _ = word
            self._say({"t": "phase", "step": step, "phase": phase} | ({"micro": micro} if micro else {}))
