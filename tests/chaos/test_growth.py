"""The judge of growth itself: a process that leaks is named, one that does not is not."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from tests.chaos.growth import MOST, WARM_UP, Growth


def _live_through(growth: Growth, layouts: list[str], each: Callable[[], object] = lambda: None) -> None:
    for number, layout in enumerate(layouts, start=1):
        each()
        growth.sample({os.getpid(): "worker"}, number, layout)


def test_what_leaks_with_every_generation_is_named() -> None:
    growth = Growth()
    held: list[int] = []
    try:
        _live_through(growth, ["dp2"] * (WARM_UP + 2 + MOST["descriptors"]), lambda: held.append(os.dup(0)))
    finally:
        for descriptor in held:
            os.close(descriptor)
    (found,) = growth.grown()
    assert ": descriptors" in found
    assert " +" in found, "it says which"
    assert f"{WARM_UP + 1}-" in growth.table()


def test_threads_and_memory_are_seen() -> None:
    growth, done = Growth(), threading.Event()
    threads = [threading.Thread(target=done.wait) for _ in range(MOST["threads"] + 1)]
    ballast: list[bytes] = []

    def grow() -> None:
        if not ballast and next(calls) == WARM_UP + 2:
            ballast.append(os.urandom(MOST["anonymous"] + (8 << 20)))
            for thread in threads:
                thread.start()

    calls = iter(range(1, 10))
    _live_through(growth, ["dp2"] * (WARM_UP + 2), grow)
    done.set()
    for thread in threads:
        thread.join()
    (found,) = growth.grown()
    assert "anonymous " in found
    assert "threads " in found


def test_only_looks_at_one_layout_are_compared() -> None:
    growth = Growth()
    held: list[int] = []

    def more() -> None:
        held.extend(os.dup(0) for _ in range(MOST["descriptors"]))

    try:
        _live_through(growth, [f"dp{number}" for number in range(2, 8)], more)
    finally:
        for descriptor in held:
            os.close(descriptor)
    assert not growth.grown()
    assert len(growth.table().splitlines()) == 1


def test_a_process_that_is_gone_is_no_trouble() -> None:
    growth = Growth()
    growth.sample({0: "controller", 2**22 + 1: "worker"}, 1, "dp2")
    assert not growth.grown()
