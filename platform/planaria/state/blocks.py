"""The bytes of one slice, verified block by block as they pass."""

from __future__ import annotations

import numpy as np
import xxhash

from planaria.state.checksum import DIGEST_BYTES, block_bytes, block_count
from planaria.state.errors import CheckpointDamaged
from planaria.state.index import Slice
from planaria.state.shard import Shard


class SliceBytes:
    """The bytes of one slice in its shard file, and which blocks of them are known to be intact.

    Thread-safe: all that threads share is one flag per block, set once; whoever does not see it yet verifies the
    block again.

    Attributes:
        item: the slice.
        place: name of its file, and its first byte there.
        chunk: how many bytes to ask for at a time.
        block: bytes of a block, all but the last.
        verified: 1 for every block that was found intact, else 0.
    """

    def __init__(self, shard: Shard, item: Slice, block: int) -> None:
        """``block``: most bytes under one digest."""
        self.item, self.chunk = item, shard.blob.chunk
        self._path, self._read, self._start = shard.blob.path, shard.blob.read_into, shard.entries[item.key].start
        self.place = (item.file, self._start)
        self.block = block_bytes(item.nbytes, block)
        self.verified = bytearray(block_count(item.nbytes, block))

    def stream(self, start: int) -> Stream:
        """The bytes from ``start`` of the slice on, to be read in order."""
        return Stream(self, start, None)

    def verify(self) -> None:
        """Read and check every block that has not been yet.

        Raises:
            CheckpointDamaged: names all damaged ranges.
        """
        wrong: list[int] = []
        size = min(self.chunk, self.item.nbytes)
        buffer = np.empty(size, np.uint8).data
        first = self.doubtful(0)
        while first < len(self.verified):
            last = self.verified.find(1, first)
            start, stop = self.span(first)[0], self.item.nbytes if last < 0 else self.span(last)[0]
            stream = Stream(self, start, wrong)
            for at in range(start, stop, size):
                stream.fill(buffer[: stop - at])
            first = len(self.verified) if last < 0 else self.doubtful(last)
        if wrong:
            raise self.damaged(wrong)

    def read(self, buffer: memoryview, start: int) -> None:
        """Fill ``buffer`` from byte ``start`` of the slice, unverified."""
        try:
            count = self._read(buffer, self._start + start)
        except OSError as error:
            raise self._unreadable(f"cannot be read: {error.strerror}") from error
        if count < len(buffer):
            raise self._unreadable(f"the file ends {len(buffer) - count} bytes too early")

    def span(self, number: int) -> tuple[int, int]:
        """First byte of a block in the slice, and the first past it."""
        return number * self.block, min((number + 1) * self.block, self.item.nbytes)

    def doubtful(self, number: int) -> int:
        """The first block from ``number`` on that is not verified yet; past the last one if there is none."""
        found = self.verified.find(0, number)
        return len(self.verified) if found < 0 else found

    def damaged(self, numbers: list[int]) -> CheckpointDamaged:
        """The error that names these blocks, in order, by their bytes in the file."""
        ranges: list[tuple[int, int]] = []
        for start, stop in map(self.span, numbers):
            if ranges and ranges[-1][1] == start:
                start = ranges.pop()[0]
            ranges.append((start, stop))
        shown = ", ".join(f"{self._start + start}:{self._start + stop}" for start, stop in ranges)
        return self._unreadable(f"bytes {shown} of the file do not match their checksum")

    def _unreadable(self, reason: str) -> CheckpointDamaged:
        return CheckpointDamaged(self._path, str(self.item), reason)


class Stream:
    """Reads a slice from some byte on, in order, into whatever buffers it is given.

    Every block is hashed right after it was read, chunk by chunk, and compared at its end; blocks that are known to be
    intact are only read. What was read counts as verified once :meth:`finish` has returned.
    """

    def __init__(self, source: SliceBytes, start: int, wrong: list[int] | None) -> None:
        """``wrong``: takes the numbers of damaged blocks, which else raise."""
        self._source, self._at, self._wrong = source, start, wrong
        self._hash = xxhash.xxh3_128()
        number, ahead = divmod(start, source.block)
        if ahead and not source.verified[number]:
            self._at -= ahead
            self._skip(ahead)

    def fill(self, buffer: memoryview) -> None:
        """Read the next bytes.

        Raises:
            CheckpointDamaged: a block that ends here is not what was written, or the file cannot be read.
        """
        # Written to run without calls: between two reads, which empty the caches, Python is slow.
        source, chunk, block, verified = self._source, self._source.chunk, self._source.block, self._source.verified
        nbytes, checksums = source.item.nbytes, source.item.checksums
        base = at = self._at
        stop = base + len(buffer)
        while at < stop:
            number, ahead = divmod(at, block)
            if verified[number]:
                until = min(stop, source.doubtful(number) * block)
                source.read(buffer[at - base : until - base], at)
                at = self._at = until
                continue
            until = min(stop, at + chunk)
            source.read(buffer[at - base : until - base], at)
            while at < until:
                end = min((number + 1) * block, nbytes)
                part = buffer[at - base : min(end, until) - base]
                if ahead == 0 and end <= until:
                    found = xxhash.xxh3_128_digest(part)
                else:
                    if ahead == 0:
                        self._hash.reset()
                    self._hash.update(part)
                    found = self._hash.digest() if end <= until else b""
                if found == checksums[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]:
                    verified[number] = 1
                elif found:
                    self._damaged(number)
                at, number, ahead = min(end, until), number + 1, 0
            self._at = at

    def finish(self) -> None:
        """Verify the last block, reading what is left of it.

        Raises:
            CheckpointDamaged: it is not what was written, or cannot be read.
        """
        source = self._source
        number, ahead = divmod(self._at, source.block)
        if ahead and self._at < source.item.nbytes and not source.verified[number]:
            self._skip(source.span(number)[1] - self._at)

    def _damaged(self, number: int) -> None:
        if self._wrong is None:
            raise self._source.damaged([number])
        self._wrong.append(number)

    def _skip(self, count: int) -> None:
        aside = np.empty(min(count, self._source.chunk), np.uint8).data
        for done in range(0, count, len(aside)):
            self.fill(aside[: count - done])
