"""The checksum of all state: XXH3-128, which is faster than memory can be copied, on one core.

It finds damage (a flipped bit, a torn write, a missing block), not forgery: whoever can write to the storage of
checkpoints can write their manifest, too.
"""

from __future__ import annotations

import xxhash

DIGEST_BYTES = 16


def checksum(data: bytes | bytearray | memoryview) -> str:
    """XXH3-128 of ``data``, in hex."""
    return xxhash.xxh3_128_hexdigest(data)


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """XXH3-128 of ``data``, as :data:`DIGEST_BYTES` bytes."""
    return xxhash.xxh3_128_digest(data)
