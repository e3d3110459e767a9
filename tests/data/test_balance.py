from __future__ import annotations

import random
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.data.balance import assign, utilisation


@settings(max_examples=50, deadline=None)
@given(costs=st.lists(st.integers(0, 5000), max_size=40), ranks=st.integers(1, 9))
def test_every_sample_is_dealt_once(costs: list[int], ranks: int) -> None:
    dealt = assign(costs, ranks)
    assert len(dealt) == ranks and sorted(chain.from_iterable(dealt)) == list(range(len(costs)))
    assert dealt == assign(costs, ranks) and 0 < utilisation(costs, dealt) <= 1


def test_mixed_resolutions_are_balanced_where_slices_are_not() -> None:
    """Patches of pictures from 224 to 1024 pixels, 14 to a side, and some text."""
    draw = random.Random(0)
    ours, slices = [], []
    for _ in range(20):
        costs = [(draw.choice([224, 336, 512, 768, 1024]) // 14) ** 2 + draw.randint(10, 200) for _ in range(64)]
        ours.append(utilisation(costs, assign(costs, 8)))
        slices.append(utilisation(costs, [range(8 * rank, 8 * rank + 8) for rank in range(8)]))
    assert min(ours) >= 0.95 > sum(slices) / len(slices)


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="ranks"):
        assign([1], 0)
    with pytest.raises(ValueError, match="below 0"):
        assign([-1], 1)
