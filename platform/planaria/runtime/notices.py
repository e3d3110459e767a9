"""A SIGTERM is a notice, not an end: the controller is told, and says when to leave.

Ray's own handler ends an actor's process at once, and with it the rank in the middle of a step. The constructor of
an actor runs in the main thread, where a handler can be set; Ray's loop, which occupies that thread ever after,
lets Python handle signals every few milliseconds. Whatever must be over at once is ended otherwise: by ``ray.kill``,
or by the cut line to the controller.
"""

from __future__ import annotations

import logging
import queue
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Notices:
    """From now on ``tell("SIGTERM")`` is called, in a thread of its own, for every SIGTERM to this process.

    Outside the main thread no handler can be set: a SIGTERM then does what it did before.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        # A handler may interrupt anything, code that holds a lock included; put() of this queue is safe there.
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._before: Any = None
        self.installed = threading.current_thread() is threading.main_thread()
        if not self.installed:
            logging.getLogger(__name__).warning("not in the main thread: a SIGTERM will not be taken for a notice")
            return
        threading.Thread(target=self._pass_on, name="notices", daemon=True).start()
        self._before = signal.signal(signal.SIGTERM, self._handle)

    def close(self) -> None:
        """Give the signal back to whoever handled it before; in the main thread."""
        if self.installed:
            signal.signal(signal.SIGTERM, self._before)
            self._queue.put(None)
            self.installed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._queue.put(signal.Signals(number).name)

    def _pass_on(self) -> None:
        while (name := self._queue.get()) is not None:
            self._tell(name)
