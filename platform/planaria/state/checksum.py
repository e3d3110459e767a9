"""The checksum of all state: XXH3-128, which is faster than memory can be copied, on one core.

It finds damage (a flipped bit, a torn write, a missing block), not forgery: whoever can write to the storage of
checkpoints can write their manifest, too.

A slice has one digest per block of its bytes, so that reading a part of it verifies the blocks it touches and no more.
"""

from __future__ import annotations

import functools

import xxhash

DIGEST_BYTES = 16

BLOCK = 1 << 20
"""Most bytes under one digest. Where a layout cuts through a slice, up to a block on either side of the cut is read
beside what is wanted: smaller blocks waste less there, larger ones make the manifest shorter (32 characters each)."""


def checksum(data: bytes | bytearray | memoryview) -> str:
    """XXH3-128 of ``data``, in hex."""
    return xxhash.xxh3_128_hexdigest(data)


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """XXH3-128 of ``data``, as :data:`DIGEST_BYTES` bytes."""
    return xxhash.xxh3_128_digest(data)


@functools.lru_cache(1 << 12)  # there are many slices, of few sizes
def block_bytes(nbytes: int, most: int = BLOCK) -> int:
    """Size of the blocks of a slice of ``nbytes``: ``most``, or for the sake of small slices as little as an eighth of
    it, so that they, too, have thirty-two blocks."""
    size = most
    for parts in (1, 2, 4, 8):
        size = -(-most // parts)
        if nbytes >= 32 * size:
            break
    return size


def block_digests(data: memoryview, most: int = BLOCK) -> bytes:
    """The digests of all blocks of ``data``, one after the other; the last block may be shorter."""
    size = block_bytes(len(data), most)
    return b"".join(digest(data[start : start + size]) for start in range(0, len(data), size))


def block_count(nbytes: int, most: int = BLOCK) -> int:
    """Number of blocks of ``nbytes`` bytes: none where there is no byte."""
    return -(-nbytes // block_bytes(nbytes, most))
