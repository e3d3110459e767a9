from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.data.order import index_at, indices

sizes = st.integers(1, 300)
seeds = st.integers(0, 2**64)


@settings(max_examples=60, deadline=None)
@given(n=sizes, epoch=st.integers(0, 10**6), seed=seeds, shuffle=st.booleans())
def test_every_epoch_is_a_permutation(n: int, epoch: int, seed: int, shuffle: bool) -> None:
    assert sorted(indices(epoch * n, (epoch + 1) * n, n, seed, shuffle)) == list(range(n))


@settings(max_examples=60, deadline=None)
@given(n=sizes, start=st.integers(0, 10**9), length=st.integers(0, 200), seed=seeds, shuffle=st.booleans())
def test_vectorised_equals_scalar_across_epochs(n: int, start: int, length: int, seed: int, shuffle: bool) -> None:
    expected = [index_at(p, n, seed, shuffle) for p in range(start, start + length)]
    assert indices(start, start + length, n, seed, shuffle) == expected


@settings(max_examples=30, deadline=None)
@given(n=st.integers(64, 3000), seed=st.integers(0, 2**32), epoch=st.integers(0, 1000))
def test_seeds_and_epochs_differ(n: int, seed: int, epoch: int) -> None:
    this = indices(epoch * n, (epoch + 1) * n, n, seed, True)
    assert this != indices(epoch * n, (epoch + 1) * n, n, seed + 1, True)
    assert this != indices((epoch + 1) * n, (epoch + 2) * n, n, seed, True)
    assert this != list(range(n))


def test_batches_tile_the_epoch_whatever_their_size() -> None:
    n, seed = 1000, 5
    whole = indices(0, 2 * n, n, seed, True)
    for batch in (1, 7, 64, 999, 1001):
        steps = -(-2 * n // batch)
        read = [index for t in range(steps) for index in indices(t * batch, (t + 1) * batch, n, seed, True)]
        assert read[: 2 * n] == whole


def test_a_huge_data_set_costs_no_memory_and_no_time() -> None:
    n = 10**15
    found = indices(7 * n - 50, 7 * n + 50, n, 1, True)
    assert len(set(found)) == 100 and all(0 <= index < n for index in found)
    assert found[0] == index_at(7 * n - 50, n, 1, True)


def test_shuffle_spreads_neighbours_and_has_no_favourite_place() -> None:
    n = 4096
    first = indices(0, n, n, 3, True)
    jumps = [abs(a - b) for a, b in itertools.pairwise(first)]
    assert abs(sum(jumps) / len(jumps) - n / 3) < n / 20  # the mean distance of two random points is n/3
    # Small sets: over many epochs each index comes first about equally often.
    firsts = [index_at(epoch * 5, 5, 0, True) for epoch in range(2000)]
    assert all(300 < firsts.count(index) < 500 for index in range(5))


def test_order_is_fixed_for_ever_and_ignores_the_hash_seed() -> None:
    """A changed value here would silently change every resumed run."""
    expected = indices(0, 8, 1000, 42, True)
    assert expected == PINNED
    code = "from planaria.data.order import indices; print(indices(0, 8, 1000, 42, True))"
    for hash_seed in ("0", "123"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert out.stdout.strip() == str(expected)


PINNED = [563, 975, 853, 834, 575, 404, 842, 836]


@pytest.mark.parametrize(("position", "n"), [(-1, 10), (0, 0), (0, -3)])
def test_nonsense_is_refused(position: int, n: int) -> None:
    with pytest.raises(ValueError, match=r"negative|samples"):
        index_at(position, n, 0, True)
    with pytest.raises(ValueError, match=r"negative|samples"):
        indices(position, position + 1, n, 0, True)


def test_a_backward_range_is_refused() -> None:
    with pytest.raises(ValueError, match="backwards"):
        indices(5, 4, 10, 0, True)
