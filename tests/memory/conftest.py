"""A few keepers, made and ended with every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.memory import Nodes


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    """Two nodes that keep a copy for each other."""
    with Nodes() as made:
        made.add("n0", "n1")
        yield made
