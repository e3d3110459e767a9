"""Shared memory: nameless, given back, refused in time, and valid only when sealed."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from mmap import mmap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.memory import SHARED, python, until
from tests.support.small_disk import mounted

from planaria.memory.buffers import (
    HEADER_BYTES,
    MemoryTooSmall,
    Seal,
    SharedBuffer,
    break_seal,
    free_bytes,
    map_buffer,
    nameless,
    read_seal,
    write_seal,
)

MIB = 1 << 20
MAPPER = """
import sys
from planaria.memory.buffers import HEADER_BYTES, map_buffer
memory = map_buffer(sys.argv[1], writable=True)
memory[HEADER_BYTES : HEADER_BYTES + 5] = b"hello"
print("mapped", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory, of 8 MiB."""
    with mounted(tmp_path / "shm", "8m") as folder:
        yield folder


def test_a_buffer_has_no_name(tmp_path: Path) -> None:
    buffer = SharedBuffer(str(tmp_path), 2 * MIB)
    assert not list(tmp_path.iterdir())
    assert len(buffer.data) == 2 * MIB - HEADER_BYTES
    buffer.close()


def test_a_file_system_without_nameless_files_serves_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: str, flags: int, *args: int, **kwargs: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    descriptor = nameless(str(tmp_path))
    assert not list(tmp_path.iterdir())
    os.close(descriptor)


def test_memory_is_given_back_when_the_last_process_goes_even_by_sigkill(small: Path) -> None:
    free = free_bytes(str(small))
    buffer = SharedBuffer(str(small), 4 * MIB)
    mapper = python(MAPPER, buffer.path)
    try:
        assert mapper.stdout is not None
        assert mapper.stdout.readline() == "mapped\n"
        assert bytes(buffer.data[:5]) == b"hello"
        buffer.close()
        assert free - free_bytes(str(small)) >= 4 * MIB, "the other process still maps it"
    finally:
        mapper.kill()
        mapper.communicate()
    until(lambda: free_bytes(str(small)) == free, "the memory comes back")


def test_a_buffer_in_use_can_be_closed_and_goes_with_its_last_view(small: Path) -> None:
    free = free_bytes(str(small))
    buffer = SharedBuffer(str(small), 2 * MIB)
    view = buffer.data[:8]
    view[:] = b"12345678"
    buffer.close()
    assert bytes(view) == b"12345678"
    del buffer, view
    gc.collect()
    assert free_bytes(str(small)) == free


def test_too_little_memory_is_told_with_both_sizes_and_the_remedy(small: Path) -> None:
    free = free_bytes(str(small))
    with pytest.raises(MemoryTooSmall, match=rf"{16 * MIB:,} bytes.*{free:,} are free.*--shm-size.*memory\.replicas"):
        SharedBuffer(str(small), 16 * MIB)
    assert free_bytes(str(small)) == free, "nothing of it stays allocated"


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        SharedBuffer(str(tmp_path / "nowhere"), MIB)


@pytest.fixture(scope="module")
def page() -> Iterator[mmap]:
    buffer = SharedBuffer(SHARED, HEADER_BYTES)
    yield map_buffer(buffer.path, writable=True)
    buffer.close()


words = st.integers(0, 2**64 - 1)
SEAL = 56
"""Bytes that it takes."""


@given(words, words)
def test_a_seal_says_which_state_it_is(page: mmap, generation: int, step: int) -> None:
    write_seal(page, Seal(generation, step))
    assert read_seal(page) == Seal(generation, step)
    break_seal(page)
    assert read_seal(page) is None


@given(words, words, words, st.integers(0, SEAL - 1), st.booleans())
def test_a_seal_half_written_is_not_valid(
    page: mmap, generation: int, old: int, step: int, done: int, broken_before: bool
) -> None:
    """The writer dies after ``done`` bytes, over an older seal or over none."""
    write_seal(page, Seal(generation, step))
    new = page[:SEAL]
    write_seal(page, Seal(generation, old))
    valid = {new, page[:SEAL]}
    if broken_before:
        break_seal(page)
    page[:SEAL] = new[:done] + page[done:SEAL]
    assert (read_seal(page) is not None) == (page[:SEAL] in valid)


@given(words, words, st.integers(0, SEAL * 8 - 1))
def test_a_flipped_bit_breaks_a_seal(page: mmap, generation: int, step: int, bit: int) -> None:
    write_seal(page, Seal(generation, step))
    page[bit // 8 : bit // 8 + 1] = bytes([page[bit // 8] ^ (1 << bit % 8)])
    assert read_seal(page) is None
