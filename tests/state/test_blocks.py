"""Blocks: any box of any tensor from any pieces, bit for bit; only what is touched is read and has to be intact."""

import math
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import planaria.state.blocks
import planaria.state.fetch
from planaria.state.boxes import Box, flat_range_boxes, shard_rows, split_dim
from planaria.state.checkpoint import Checkpoint
from planaria.state.checksum import block_bytes, block_count, block_digests
from planaria.state.dtypes import TORCH, dtype_of
from planaria.state.errors import CheckpointDamaged, CheckpointError
from planaria.state.local_storage import LocalBlob, LocalStorage
from planaria.state.shard import bytes_of
from planaria.state.writer import CheckpointWriter, Piece


def random_tensor(shape, code, seed=0):
    """Random bits, NaNs of any payload included."""
    high = 2 if code == "BOOL" else 256
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, high, (math.prod(shape) * dtype_of(code).itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype_of(code)).reshape(shape)


def bits(tensor):
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).reshape(-1).view(torch.uint8)


def part(tensor, box):
    return tensor[box.relative_to(Box.whole(tensor.shape))]


def save(root, shards, block, known=False):
    """One checkpoint of the tensor ``w``: a (tensor, boxes) per writing rank; gives its storage and path."""
    storage = LocalStorage(root)
    writer = CheckpointWriter(storage, 1, "t", lambda *_: None, block=block)
    slices = []
    for rank, (tensor, boxes) in enumerate(shards):
        pieces = [Piece("w", tuple(tensor.shape), box, part(tensor, box)) for box in boxes]
        if known:
            pieces = [replace(p, checksums=block_digests(bytes_of(p.data.contiguous()), block)) for p in pieces]
        slices += writer.write_shard(rank, pieces)
    return storage, writer.commit(slices, {})


def reopen(storage):
    return Checkpoint.open(storage, "step-00000001")


shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@st.composite
def covers(draw, shape):
    """Boxes by rank that together fill the tensor: as the strategies of parallelism cut it, replicas included."""
    whole, ranks = Box.whole(shape), draw(st.integers(1, 4))
    kind = draw(st.sampled_from(["whole", "rows", "grid", "flat"])) if shape else "whole"
    if kind == "rows":
        parts = [[shard_rows(shape, rank, ranks)] for rank in range(ranks)]
    elif kind == "grid":
        dim = draw(st.integers(0, len(shape) - 1))
        columns = math.gcd(shape[dim] or 1, draw(st.integers(1, 4)))
        cut = [split_dim(shape, dim, column, columns) for column in range(columns)]
        parts = [[shard_rows(box.shape, rank, ranks).within(box) for box in cut] for rank in range(ranks)]
    elif kind == "flat":
        size = -(-whole.numel // ranks)
        edges = [min(rank * size, whole.numel) for rank in range(ranks + 1)]
        parts = [flat_range_boxes(shape, edges[rank], edges[rank + 1]) for rank in range(ranks)]
        parts += [[whole]] if whole.empty else []
    else:
        parts = [[whole]]
    return parts + draw(st.lists(st.sampled_from(parts), max_size=2))


def boxes_in(shape):
    def fit(ends):
        lows, highs = [min(pair) for pair in ends], [max(pair) for pair in ends]
        return Box(tuple(lows), tuple(high - low for low, high in zip(lows, highs, strict=True)))

    return st.tuples(*[st.tuples(st.integers(0, size), st.integers(0, size)) for size in shape]).map(fit)


@settings(max_examples=300)
@given(shapes.flatmap(lambda s: st.tuples(st.just(s), covers(s), st.lists(boxes_in(s), max_size=4))), st.data())
def test_any_box_from_any_pieces(case, data):
    shape, shards, wanted = case
    tensor = random_tensor(shape, data.draw(st.sampled_from(sorted(TORCH))), data.draw(st.integers(0, 9)))
    block, chunk, long = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 64)), data.draw(st.integers(1, 200))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalBlob, "chunk", chunk)
        patch.setattr(planaria.state.fetch, "_LONG_ROW", long)
        storage, _ = save(root, [(tensor, boxes) for boxes in shards], block, known=data.draw(st.booleans()))
        with reopen(storage) as checkpoint:
            if data.draw(st.booleans()):
                assert checkpoint.verify() == []
            for box in [*wanted, Box.whole(shape)]:
                expected = part(tensor, box)
                found = checkpoint.read("w", box)
                assert found.dtype == tensor.dtype and torch.equal(bits(found), bits(expected))
                out = torch.empty((*box.shape, 2), dtype=tensor.dtype)[..., 0]  # no two elements side by side
                checkpoint.read_into([("w", box, out)])
                assert torch.equal(bits(out), bits(expected))
            assert checkpoint.verify() == []


@settings(max_examples=300)
@given(st.data())
def test_damage_is_found_where_it_is_read_and_only_there(data):
    rows, columns, most = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 9)), data.draw(st.integers(1, 40))
    tensor, row_bytes = random_tensor((rows, columns), "I16"), 2 * columns
    block = block_bytes(rows * row_bytes, most)
    box = data.draw(boxes_in((rows, columns)).filter(lambda box: not box.empty))
    position = data.draw(st.integers(0, rows * row_bytes - 1))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        storage, path = save(root, [(tensor, [Box.whole(tensor.shape)])], most)
        file = f"{path}/shard-00000.safetensors"
        with open(file, "r+b") as raw:
            at = raw.seek(0, 2) - rows * row_bytes + position
            raw.seek(at)
            byte = raw.read(1)[0]
            raw.seek(at)
            raw.write(bytes([byte ^ (1 << data.draw(st.integers(0, 7)))]))
        first, last = position // block, (at - position) + rows * row_bytes
        start, stop = at - position + first * block, min(at - position + (first + 1) * block, last)
        # Rows are read whole where only some columns are wanted, unless there is but one.
        low, high = box.offset[0] * row_bytes, box.stop[0] * row_bytes
        if box.shape[0] == 1:
            low, high = low + 2 * box.offset[1], low + 2 * box.stop[1]
        touched = low // block <= first <= (high - 1) // block
        with reopen(storage) as checkpoint:
            for attempt in range(2):
                if touched:
                    with pytest.raises(CheckpointDamaged, match=rf"bytes {start}:{stop} of the file") as caught:
                        checkpoint.read("w", box)
                    assert caught.value.file == file and caught.value.slice == f"w[0:{rows},0:{columns}]"
                else:
                    assert torch.equal(checkpoint.read("w", box), part(tensor, box))
                if not attempt:
                    (problem,) = checkpoint.verify()
                    assert f"bytes {start}:{stop} of the file" in problem


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_block_sizes(nbytes, most):
    size = block_bytes(nbytes, most)
    assert 1 <= -(-most // 8) <= size <= most and block_count(nbytes, most) == math.ceil(nbytes / size)
    assert size == -(-most // 8) or block_count(nbytes, most) >= 32
    assert len(block_digests(memoryview(bytes(nbytes)), most)) == 16 * block_count(nbytes, most)


def test_all_damaged_ranges_are_named(tmp_path):
    tensor = torch.arange(320).to(torch.uint8)
    storage, path = save(tmp_path, [(tensor, [Box.whole((320,))])], 10)
    with open(f"{path}/shard-00000.safetensors", "r+b") as raw:
        base = raw.seek(0, 2) - 320
        for position in (25, 31, 319):
            raw.seek(base + position)
            raw.write(b"\xff")
    with reopen(storage) as checkpoint:
        checkpoint.read("w", Box((0,), (15,)))
        (problem,) = checkpoint.verify()
        assert f"bytes {base + 20}:{base + 40}, {base + 310}:{base + 320} of" in problem and "w[0:320]" in problem
        assert torch.equal(checkpoint.read("w", Box((40,), (270,))), tensor[40:310])


def test_bytes_are_read_and_hashed_once(tmp_path, monkeypatch):
    tensor = random_tensor((128, 4), "F32")
    storage, _ = save(tmp_path, [(tensor, [Box.whole((128, 4))])], 64)  # four rows per block
    read, fill, digest = [], LocalBlob.read_into, planaria.state.blocks.xxh3_128_digest

    def watched(self, buffer, offset):
        read.append((offset - base, offset - base + len(buffer)))
        return fill(self, buffer, offset)

    monkeypatch.setattr(LocalBlob, "chunk", 64)
    with reopen(storage) as checkpoint:
        base = checkpoint._shards["shard-00000.safetensors"].entries["w"].start
    monkeypatch.setattr(LocalBlob, "read_into", watched)
    with reopen(storage) as checkpoint:
        read.clear()
        checkpoint.read("w", Box((6, 0), (12, 4)))  # rows 6 to 17: from inside block 1 to inside block 4
        assert read == [(64, 128), (128, 192), (192, 256), (256, 320)]
        read.clear()
        monkeypatch.setattr(planaria.state.blocks, "xxh3_128_digest", None)
        checkpoint.read("w", Box((6, 0), (12, 4)))
        assert read == [(96, 288)]  # intact for sure: one read of just these bytes
        read.clear()
        monkeypatch.setattr(planaria.state.blocks, "xxh3_128_digest", digest)
        assert checkpoint.verify() == [] and read == [(0, 64), *[(at, at + 64) for at in range(320, 2048, 64)]]
        read.clear()
        checkpoint.read("w")
        assert read == [(0, 2048)]


def test_many_threads_read_the_same_blocks(tmp_path):
    tensor = random_tensor((64, 33), "F32")
    storage, _ = save(tmp_path, [(tensor, [Box.whole(tensor.shape)])], 100)
    boxes = [Box((row, column), (9, 7)) for row in range(0, 55, 5) for column in (0, 13, 26)] * 4
    with reopen(storage) as checkpoint, ThreadPoolExecutor(8) as pool:
        for box, found in zip(boxes, pool.map(lambda box: checkpoint.read("w", box), boxes), strict=True):
            assert torch.equal(bits(found), bits(part(tensor, box)))


def test_reading_into_other_kinds_of_memory(tmp_path):
    tensor = torch.arange(24.0).reshape(4, 6)
    storage, _ = save(tmp_path, [(tensor, [Box((0, 0), (4, 3)), Box((0, 3), (4, 3))])], 16)
    with reopen(storage) as checkpoint:
        double = torch.nn.Parameter(torch.zeros(2, 4, dtype=torch.float64))
        checkpoint.read_into([("w", Box((1, 1), (2, 4)), double)])
        assert torch.equal(double, tensor[1:3, 1:5].double())
        turned = torch.zeros(6, 4).T
        checkpoint.read_into([("w", Box.whole((4, 6)), turned)])
        assert torch.equal(turned, tensor)
        with pytest.raises(CheckpointError, match="does not fit"):
            checkpoint.read_into([("w", Box((1, 1), (2, 4)), torch.zeros(4, 2))])
    scalar = torch.tensor(3, dtype=torch.int16)
    storage, _ = save(tmp_path / "scalar", [(scalar, [Box.whole(())])], 1)
    with reopen(storage) as checkpoint:
        wide = torch.zeros((), dtype=torch.int64)
        checkpoint.read_into([("w", Box.whole(()), wide)])
        assert wide == 3 and checkpoint.verify() == []


def test_digests_made_elsewhere_are_taken_as_they_are(tmp_path):
    tensor = torch.arange(100, dtype=torch.uint8)
    writer = CheckpointWriter(LocalStorage(tmp_path), 1, "t", lambda *_: None)
    piece = Piece("w", (100,), Box.whole((100,)), tensor, block_digests(bytes_of(tensor)))
    tensor[7] += 1  # memory that went wrong after it was hashed must not become a sound checkpoint
    writer.commit(writer.write_shard(0, [piece]), {})
    with reopen(LocalStorage(tmp_path)) as checkpoint:
        assert len(checkpoint.verify()) == 1
    with pytest.raises(CheckpointError, match="its 1 blocks have 16 each"):
        writer.write_shard(1, [replace(piece, checksums=b"")])


def test_slices_of_other_blocks_are_not_committed(tmp_path):
    storage = LocalStorage(tmp_path)
    piece = Piece("w", (100,), Box.whole((100,)), torch.zeros(100, dtype=torch.uint8))
    slices = CheckpointWriter(storage, 1, "t", lambda *_: None, block=2).write_shard(0, [piece])
    with pytest.raises(CheckpointError, match=r"w\[0:100\] of 100 bytes has 800 bytes of digests"):
        CheckpointWriter(storage, 1, "t", lambda *_: None, block=40).commit(slices, {})


@settings(max_examples=30)
@given(st.lists(st.integers(0, 200_000), max_size=12), st.integers(1, 1 << 17))
def test_files_hold_their_chunks_whatever_the_system_takes_at_once(sizes, most):
    import os

    chunks = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    write = os.write
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, data[:most]))
        assert LocalStorage(root).write("folder", "file", chunks) == sum(sizes)
        with open(f"{root}/folder/file", "rb") as file:
            assert file.read() == b"".join(chunks)
