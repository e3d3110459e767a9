"""A few keepers, made and ended with every test; no thread may fail unheard."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator

import pytest
from tests.support.memory import Nodes


@pytest.fixture(autouse=True)
def sound_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails the test in which a thread ended by an exception."""
    failures: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    yield
    assert not failures, "".join(traceback.format_exception(failures[0].exc_value))


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    """Two nodes that keep a copy for each other."""
    with Nodes() as made:
        made.add("n0", "n1")
        yield made
