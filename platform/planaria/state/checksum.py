"""The checksum of all state: XXH3-128, which is faster than memory can be copied, on one core.

It finds damage (a flipped bit, a torn write, a missing block), not forgery: whoever can write to the storage of
checkpoints can write their manifest, too.

A slice has one digest per block of its bytes, so that reading a part of it verifies the blocks it touches and no more.
"""

from __future__ import annotations

import xxhash

DIGEST_BYTES = 16

BLOCK = 1 << 20
"""Bytes under one digest. Where a layout cuts through a slice, up to a block on either side of the cut is read beside
what is wanted: smaller blocks waste less there, larger ones make the manifest shorter (32 characters per block)."""


def checksum(data: bytes | bytearray | memoryview) -> str:
    """XXH3-128 of ``data``, in hex."""
    return xxhash.xxh3_128_hexdigest(data)


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """XXH3-128 of ``data``, as :data:`DIGEST_BYTES` bytes."""
    return xxhash.xxh3_128_digest(data)


def block_digests(data: memoryview, block: int = BLOCK) -> bytes:
    """The digests of every ``block`` bytes of ``data``, one after the other; the last block may be shorter."""
    return b"".join(digest(data[start : start + block]) for start in range(0, len(data), block))


def block_count(nbytes: int, block: int = BLOCK) -> int:
    """Number of blocks of ``nbytes`` bytes: none where there is no byte."""
    return -(-nbytes // block)
