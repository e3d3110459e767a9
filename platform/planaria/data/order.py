"""The global order of samples: a pure function of (position, size of the data set, seed).

Position p counts samples since the start of the run, so p // n is the epoch, and batch k of a job with
global batch B is positions [k * B, (k + 1) * B). Step t reads batch t, or a later one where windows of the
data are left out (:mod:`planaria.data.skips`). Ranks, workers and nodes appear nowhere:
every layout reads the same samples, and there is no queue state to save or restore.

Each epoch is a permutation of the indices: a balanced Feistel network (Luby and Rackoff, 1988) over the
smallest even number of bits that holds them, with cycle walking (Black and Rogaway, 2002) for sizes
that are no power of two. It is lazy: any position costs O(1) time, and no epoch is ever materialised.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
Word = Any  # an int or a U64: the same expressions serve both, which no annotation of NumPy's operators can say

ROUNDS = 8
_MASK64 = (1 << 64) - 1
_MIN_HALF_BITS = 3  # with fewer bits a Feistel network reaches only a few of the permutations


def index_at(position: int, n: int, seed: int, shuffle: bool) -> int:
    """Dataset index (0 <= index < n) of the sample at ``position`` >= 0 of the global order.

    Raises:
        ValueError: ``position`` is negative or ``n`` is not positive.
    """
    _check(position, n)
    epoch, offset = divmod(position, n)
    if not shuffle or n == 1:
        return offset
    half_bits, keys = _half_bits(n), _round_keys(seed, epoch, n)
    while True:  # cycle walking: leave the padded domain [n, 2^bits) by going on along the cycle
        offset = int(_feistel(offset, half_bits, keys))
        if offset < n:
            return offset


def candidate(position: int, attempt: int, n: int, seed: int, shuffle: bool) -> int:
    """Dataset index of what stands at ``position``: in the order itself for attempt 0, else the substitute that is
    tried after so many damaged samples. A function of the position, not of what was read before: every layout finds
    the same one.

    Raises:
        ValueError: as :func:`index_at`, or ``attempt`` is negative.
    """
    if attempt < 0:
        raise ValueError(f"attempt {attempt} is negative")
    if attempt == 0:
        return index_at(position, n, seed, shuffle)
    _check(position, n)
    name = f"planaria substitute {seed} {position} {attempt}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") % n


def indices(start: int, stop: int, n: int, seed: int, shuffle: bool) -> list[int]:
    """``[index_at(p, ...) for p in range(start, stop)]``, vectorised; the range may span epochs.

    Raises:
        ValueError: ``start`` is negative, ``stop`` lies before it, or ``n`` is not positive.
    """
    _check(start, n)
    if stop < start:
        raise ValueError(f"positions [{start}, {stop}) run backwards")
    found: list[int] = []
    while start < stop:
        epoch, offset = divmod(start, n)
        end = min(stop, (epoch + 1) * n)
        run = np.arange(offset, offset + end - start, dtype=np.uint64)
        if shuffle and n > 1:
            run = _permute(run, n, _round_keys(seed, epoch, n))
        found.extend(run.tolist())
        start = end
    return found


def _check(position: int, n: int) -> None:
    if position < 0:
        raise ValueError(f"position {position} is negative")
    if not 0 < n < 1 << 62:
        raise ValueError(f"a data set of {n} samples has no order; it needs between 1 and 2^62 - 1")


def _half_bits(n: int) -> int:
    return max(_MIN_HALF_BITS, ((n - 1).bit_length() + 1) // 2)


@functools.lru_cache(maxsize=64)
def _round_keys(seed: int, epoch: int, n: int) -> tuple[int, ...]:
    digest = hashlib.blake2b(f"planaria order {seed} {epoch} {n}".encode(), digest_size=8 * ROUNDS).digest()
    return tuple(int.from_bytes(digest[i : i + 8], "little") for i in range(0, len(digest), 8))


def _mix(word: Word) -> Word:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014) on 64-bit words, scalar or array."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK64
    return word ^ (word >> 31)


def _feistel(word: Word, half_bits: int, keys: tuple[int, ...]) -> Word:
    low_mask = (1 << half_bits) - 1
    left, right = word >> half_bits, word & low_mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & low_mask)
    return (left << half_bits) | right


def _permute(offsets: U64, n: int, keys: tuple[int, ...]) -> U64:
    half_bits = _half_bits(n)
    result: U64 = _feistel(offsets, half_bits, keys)
    while (outside := result >= n).any():
        result[outside] = _feistel(result[outside], half_bits, keys)
    return result
