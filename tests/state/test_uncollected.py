"""The garbage collector comes back, whoever leaves last."""

from __future__ import annotations

import gc
import threading

import pytest

from planaria.state.uncollected import uncollected


def test_the_collector_is_back_after_the_last_of_several_and_after_an_error() -> None:
    assert gc.isenabled()
    with uncollected():
        with pytest.raises(ValueError, match="inside"), uncollected():
            raise ValueError("inside")
        assert not gc.isenabled()
        inside, leave = threading.Event(), threading.Event()

        def other() -> None:
            with uncollected():
                inside.set()
                leave.wait(10)

        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(10)
    assert not gc.isenabled(), "the other thread is still inside"
    leave.set()
    thread.join(10)
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
