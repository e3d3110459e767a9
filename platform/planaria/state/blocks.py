"""The bytes of one slice, verified block by block as they pass."""

from __future__ import annotations

import xxhash

from planaria.state.checksum import DIGEST_BYTES, block_count
from planaria.state.errors import CheckpointDamaged
from planaria.state.index import Slice
from planaria.state.shard import Shard


class SliceBytes:
    """The bytes of one slice in its shard file, and which blocks of them are known to be intact.

    Thread-safe: all that threads share is one flag per block, set once; whoever does not see it yet verifies the
    block again.

    Attributes:
        item: the slice.
        chunk: how many bytes to ask for at a time.
    """

    def __init__(self, shard: Shard, item: Slice, block: int) -> None:
        self.item, self.chunk = item, shard.blob.chunk
        self._block, self._shard, self._start = block, shard, shard.entries[item.key].start
        self._verified = bytearray(block_count(item.nbytes, block))

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
        buffer = memoryview(bytearray(size))
        first = self.doubtful(0)
        while first < len(self._verified):
            last = self._verified.find(1, first)
            start, stop = self.span(first)[0], self.item.nbytes if last < 0 else self.span(last)[0]
            stream = Stream(self, start, wrong)
            for at in range(start, stop, size):
                stream.fill(buffer[: stop - at])
            first = len(self._verified) if last < 0 else self.doubtful(last)
        if wrong:
            raise self.damaged(wrong)

    def read(self, buffer: memoryview, start: int) -> None:
        """Fill ``buffer`` from byte ``start`` of the slice, unverified."""
        self._shard.read_bytes(buffer, self._start + start, str(self.item))

    def block_of(self, at: int) -> int:
        """Number of the block that byte ``at`` of the slice is in."""
        return at // self._block

    def span(self, number: int) -> tuple[int, int]:
        """First byte of a block in the slice, and the first past it."""
        return number * self._block, min((number + 1) * self._block, self.item.nbytes)

    def doubtful(self, number: int) -> int:
        """The first block from ``number`` on that is not verified yet; past the last one if there is none."""
        found = self._verified.find(0, number)
        return len(self._verified) if found < 0 else found

    def settle(self, number: int, digest: bytes) -> bool:
        """Whether a block of this digest is intact; if so, it counts as verified from now on."""
        intact = digest == self.item.checksums[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        if intact:
            self._verified[number] = 1
        return intact

    def damaged(self, numbers: list[int]) -> CheckpointDamaged:
        """The error that names these blocks, in order, by their bytes in the file."""
        ranges: list[tuple[int, int]] = []
        for start, stop in map(self.span, numbers):
            if ranges and ranges[-1][1] == start:
                start = ranges.pop()[0]
            ranges.append((start, stop))
        shown = ", ".join(f"{self._start + start}:{self._start + stop}" for start, stop in ranges)
        reason = f"bytes {shown} of the file do not match their checksum"
        return CheckpointDamaged(self._shard.blob.path, str(self.item), reason)


class Stream:
    """Reads a slice from some byte on, in order, into whatever buffers it is given.

    Every block is hashed chunk by chunk, right after each chunk was read, and compared at its end; blocks that are
    known to be intact are only read. What was read counts as verified once :meth:`finish` has returned.
    """

    def __init__(self, source: SliceBytes, start: int, wrong: list[int] | None) -> None:
        """``wrong``: takes the numbers of damaged blocks, which else raise."""
        self._source, self._at, self._wrong = source, start, wrong
        self._hash = xxhash.xxh3_128()
        first = source.block_of(start)
        begin, _ = source.span(first)
        if begin < start and source.doubtful(first) == first:
            self._at = begin
            self._skip(start - begin)

    def fill(self, buffer: memoryview) -> None:
        """Read the next bytes.

        Raises:
            CheckpointDamaged: a block that ends here is not what was written, or the file cannot be read.
        """
        while buffer:
            sure, _ = self._source.span(self._source.doubtful(self._source.block_of(self._at)))
            part = buffer[: max(self._source.chunk, sure - self._at)]
            self._source.read(part, self._at)
            self._check(part)
            buffer = buffer[len(part) :]

    def finish(self) -> None:
        """Verify the last block, reading what is left of it.

        Raises:
            CheckpointDamaged: it is not what was written, or cannot be read.
        """
        number = self._source.block_of(self._at)
        begin, end = self._source.span(number)
        if begin < self._at < end and self._source.doubtful(number) == number:
            self._skip(end - self._at)

    def _check(self, part: memoryview) -> None:
        while part:
            number = self._source.block_of(self._at)
            begin, end = self._source.span(number)
            inside = part[: end - self._at]
            if self._source.doubtful(number) == number:
                if self._at == begin:
                    self._hash.reset()
                self._hash.update(inside)
                if self._at + len(inside) == end and not self._source.settle(number, self._hash.digest()):
                    if self._wrong is None:
                        raise self._source.damaged([number])
                    self._wrong.append(number)
            self._at += len(inside)
            part = part[len(inside) :]

    def _skip(self, count: int) -> None:
        aside = memoryview(bytearray(min(count, self._source.chunk)))
        for done in range(0, count, len(aside)):
            self.fill(aside[: count - done])
