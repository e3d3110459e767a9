"""One pool of ranks for all tests of the engine: starting processes costs more than most tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.ranks import RankPool


@pytest.fixture(scope="package")
def pool() -> Iterator[RankPool]:
    with RankPool(8) as ranks:  # dp 4 x tp 2
        yield ranks
