"""Stacks of a process, written by one thread about the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from planaria.runtime.stacks import stacks


@contextmanager
def stuck(name: str, wait: Callable[[threading.Event], object]) -> Iterator[int]:
    """A thread of that name that waits in ``wait``; yields its ident."""
    entered, leave = threading.Event(), threading.Event()

    def body() -> None:
        entered.set()
        wait(leave)

    thread = threading.Thread(target=body, name=name, daemon=True)
    thread.start()
    entered.wait(10)
    try:
        assert thread.ident is not None
        yield thread.ident
    finally:
        leave.set()
        thread.join(10)


def wait_in_a_collective(leave: threading.Event) -> None:
    leave.wait()


def wait_deep_below(leave: threading.Event, depth: int = 300) -> None:
    if depth:
        wait_deep_below(leave, depth - 1)
    else:
        wait_in_a_collective(leave)


def test_the_training_thread_comes_first_and_the_writer_last() -> None:
    with stuck("zeta", wait_in_a_collective) as training, stuck("alpha", wait_in_a_collective):
        text = stacks(training)
    heads = [line for line in text.splitlines() if line.startswith("-- ")]
    assert heads[0].startswith("-- zeta (training), thread ")
    assert "(wrote this)" in heads[-1]
    assert any(head.startswith("-- alpha") for head in heads[1:-1])
    first = text.split("-- ")[1]
    assert "wait_in_a_collective" in first and "leave.wait()" in first
    assert first.index("in body") < first.index("wait_in_a_collective"), "the innermost call comes last"


@pytest.mark.parametrize("limit", [1000, 3000, 32_000])
def test_the_answer_is_bounded_and_keeps_what_matters(limit: int) -> None:
    with stuck("deep", wait_deep_below) as training:
        threads = [stuck(f"more-{at}", wait_in_a_collective) for at in range(20)]
        for thread in threads:
            thread.__enter__()
        try:
            text = stacks(training, limit)
        finally:
            for thread in threads:
                thread.__exit__(None, None, None)
    assert len(text) <= limit
    first = text.split("\n-- ")[0]
    assert first.startswith("-- deep (training)") and "leave.wait()" in first
    assert ("did not fit" in text) == (limit < 32_000)
