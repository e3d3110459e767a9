"""The bytes of one slice, verified block by block as they pass."""

from __future__ import annotations

from xxhash import xxh3_128_digest

from planaria.state.checksum import DIGEST_BYTES, block_bytes, block_count
from planaria.state.errors import CheckpointDamaged
from planaria.state.index import Slice
from planaria.state.scratch import Memory
from planaria.state.shard import Shard


class SliceBytes:
    """The bytes of one slice in its shard file, and which blocks of them are known to be intact.

    Thread-safe: all that threads share is one flag per block, set once; whoever does not see it yet verifies the
    block again.

    Attributes:
        item: the slice.
        place: name of its file, and its first byte there.
        block: bytes of a block, all but the last.
        step: how many bytes to ask for at a time: whole blocks, about as many as the storage likes.
        verified: 1 for every block that was found intact, else 0.
    """

    __slots__ = ("_path", "_read", "_start", "block", "item", "place", "step", "verified")

    def __init__(self, shard: Shard, item: Slice, block: int) -> None:
        """``block``: most bytes under one digest."""
        self.item = item
        self._path, self._read, self._start = shard.blob.path, shard.blob.read_into, shard.entries[item.key].start
        self.place = (item.file, self._start)
        self.block = block_bytes(item.nbytes, block)
        self.step = max(1, shard.blob.chunk // self.block) * self.block
        self.verified = bytearray(block_count(item.nbytes, block))

    def fill(self, buffer: memoryview, start: int, aside: Memory) -> None:
        """Fill ``buffer`` from byte ``start`` of the slice on.

        Every block is hashed right after it was read, unless it is known to be intact; one of which only a part is
        wanted is read ``aside`` for that.

        Raises:
            CheckpointDamaged: a block is not what was written, or the file cannot be read.
        """
        block, nbytes, at, stop = self.block, self.item.nbytes, start, start + len(buffer)
        whole = stop if stop == nbytes else stop - stop % block
        while at < stop:
            number, ahead = divmod(at, block)
            if self.verified[number]:
                until = min(stop, self._doubtful(number) * block)
                self._read_at(buffer[at - start : until - start], at)
            elif ahead or at >= whole:
                first, end = number * block, min((number + 1) * block, nbytes)
                until = min(end, stop)
                data = aside(end - first)
                self._read_at(data, first)
                if self._check(number, data):
                    raise self._damaged([number])
                buffer[at - start : until - start] = data[ahead : until - first]
            else:
                until = min(at + self.step, whole)
                data = buffer[at - start : until - start]
                self._read_at(data, at)
                if wrong := self._check(number, data):
                    raise self._damaged(wrong[:1])
            at = until

    def verify(self, aside: Memory) -> None:
        """Read and check every block that has not been yet.

        Raises:
            CheckpointDamaged: names all damaged ranges.
        """
        wrong: list[int] = []
        count, at_once = len(self.verified), self.step // self.block
        number = self._doubtful(0)
        while number < count:
            known = self.verified.find(1, number)
            last = min(count if known < 0 else known, number + at_once)
            start = self._span(number)[0]
            data = aside(self._span(last - 1)[1] - start)
            self._read_at(data, start)
            wrong += self._check(number, data)
            number = self._doubtful(last)
        if wrong:
            raise self._damaged(wrong)

    def _check(self, number: int, data: memoryview) -> list[int]:
        """Mark the whole blocks from ``number`` on that ``data`` holds; returns the damaged ones."""
        # All at once: between two reads, which empty the caches, Python is slow.
        block = self.block
        found = [xxh3_128_digest(data[at : at + block]) for at in range(0, len(data), block)]
        last, checksums = number + len(found), self.item.checksums
        if b"".join(found) == checksums[number * DIGEST_BYTES : last * DIGEST_BYTES]:
            self.verified[number:last] = b"\1" * len(found)
            return []
        wrong: list[int] = []
        for at, digest in enumerate(found, number):
            if digest == checksums[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]:
                self.verified[at] = 1
            else:
                wrong.append(at)
        return wrong

    def _read_at(self, buffer: memoryview, start: int) -> None:
        """Fill ``buffer`` from byte ``start`` of the slice, unverified."""
        try:
            count = self._read(buffer, self._start + start)
        except OSError as error:
            raise self._unreadable(f"cannot be read: {error.strerror}") from error
        if count < len(buffer):
            raise self._unreadable(f"the file ends {len(buffer) - count} bytes too early")

    def _span(self, number: int) -> tuple[int, int]:
        """First byte of a block in the slice, and the first past it."""
        return number * self.block, min((number + 1) * self.block, self.item.nbytes)

    def _doubtful(self, number: int) -> int:
        """The first block from ``number`` on that is not verified yet; past the last one if there is none."""
        found = self.verified.find(0, number)
        return len(self.verified) if found < 0 else found

    def _damaged(self, numbers: list[int]) -> CheckpointDamaged:
        """The error that names these blocks, in order, by their bytes in the file."""
        ranges: list[tuple[int, int]] = []
        for start, stop in map(self._span, numbers):
            if ranges and ranges[-1][1] == start:
                start = ranges.pop()[0]
            ranges.append((start, stop))
        shown = ", ".join(f"{self._start + start}:{self._start + stop}" for start, stop in ranges)
        return self._unreadable(f"bytes {shown} of the file do not match their checksum")

    def _unreadable(self, reason: str) -> CheckpointDamaged:
        return CheckpointDamaged(self._path, str(self.item), reason)
