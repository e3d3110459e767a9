"""A SIGTERM is passed on, and ends nothing."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time

from planaria.runtime.notices import Notices

LIMIT_S = 30.0


def test_every_sigterm_is_told_and_the_old_handler_comes_back() -> None:
    told: queue.Queue[str] = queue.Queue()
    before = signal.getsignal(signal.SIGTERM)
    threads = threading.active_count()
    notices = Notices(told.put)
    try:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            assert told.get(timeout=LIMIT_S) == "SIGTERM"
    finally:
        notices.close()
    assert signal.getsignal(signal.SIGTERM) == before
    deadline = time.monotonic() + LIMIT_S
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == threads


def test_a_notice_may_come_while_its_thread_holds_the_lock_that_telling_needs() -> None:
    lock = threading.Lock()
    told: queue.Queue[str] = queue.Queue()

    def tell(why: str) -> None:
        with lock:
            told.put(why)

    notices = Notices(tell)
    try:
        with lock:
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(100):  # the handler runs between these, in this thread
                pass
        assert told.get(timeout=LIMIT_S) == "SIGTERM"
    finally:
        notices.close()


def test_outside_the_main_thread_nothing_is_changed() -> None:
    found: list[bool] = []
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=lambda: found.append(Notices(lambda why: None).installed))
    thread.start()
    thread.join(LIMIT_S)
    assert found == [False] and signal.getsignal(signal.SIGTERM) == before
