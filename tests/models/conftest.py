"""One pool of ranks for all tests of the models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.ranks import RankPool


@pytest.fixture(scope="package")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks
