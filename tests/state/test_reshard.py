"""Write in one layout, read in another: equal bit for bit."""

import json
import tempfile
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from planaria.layout import Layout
from planaria.state.boxes import Box, shard_rows, split_dim
from planaria.state.dedupe import is_writer
from planaria.state.dtypes import TORCH, dtype_of
from planaria.state.errors import CheckpointError
from planaria.state.index import Slice
from planaria.state.vault import Vault
from planaria.state.writer import Piece

META = {"lr": 0.1, "position": 12345678901234567, "layout": "dp_shard2xtp2", "nested": {"none": None}}


def held(layout: Layout, rank: int, shape: tuple[int, ...], tp_dim: int | None) -> Box:
    """What a rank holds: a tensor-parallel part, cut into rows by FSDP2."""
    at = layout.coords(rank)
    parent = Box.whole(shape)
    if tp_dim is not None and shape[tp_dim] % layout.tp == 0:
        parent = split_dim(shape, tp_dim, at["tp"], layout.tp)
    return shard_rows(parent.shape, at["dp_shard"], layout.dp_shard).within(parent) if shape else parent


def replicated(layout: Layout, shape: tuple[int, ...], tp_dim: int | None) -> set[str]:
    axes = {"pp", "dp_replicate", "cp"} | (set() if shape else {"dp_shard"})
    return axes if tp_dim is not None and shape[tp_dim] % layout.tp == 0 else axes | {"tp"}


def random_tensor(shape: tuple[int, ...], code: str, seed: int) -> torch.Tensor:
    """Random bits, NaNs of any payload included."""
    dtype = dtype_of(code)
    size = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return raw.view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


layouts = st.builds(
    Layout, dp_replicate=st.integers(1, 2), dp_shard=st.integers(1, 5), cp=st.just(1), tp=st.integers(1, 4)
)
tensors = st.lists(
    st.tuples(st.lists(st.integers(0, 9), max_size=3).map(tuple), st.sampled_from(sorted(TORCH)), st.integers(0, 2)),
    min_size=1,
    max_size=3,
)


@settings(max_examples=60)
@given(tensors, layouts, layouts, st.integers(0, 999))
def test_any_layout_loads_any_other(specs, source, target, seed):
    state = {f"model/t{i}": random_tensor(shape, code, seed + i) for i, (shape, code, _) in enumerate(specs)}
    dims = {f"model/t{i}": dim if dim < len(shape) else None for i, (shape, _, dim) in enumerate(specs)}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        slices: list[Slice] = []
        for rank in range(source.world):
            pieces = []
            for name, tensor in state.items():
                shape, dim = tuple(tensor.shape), dims[name]
                if is_writer(source.coords(rank), replicated(source, shape, dim)):
                    box = held(source, rank, shape, dim)
                    pieces.append(Piece(name, shape, box, tensor[box.relative_to(Box.whole(shape))]))
            reported = Vault(root).writer(7, "gen-1").write_shard(rank, pieces)
            slices += [Slice.from_json(json.loads(json.dumps(item.to_json()))) for item in reported]
        expected = {name: tuple(tensor.shape) for name, tensor in state.items()}
        Vault(root).writer(7, "gen-1").commit(slices, META, expected)
        checkpoint = Vault(root).latest_intact(deep=seed % 2 == 0)
        assert checkpoint is not None
        with checkpoint:
            assert checkpoint.step == 7 and checkpoint.meta == META and set(checkpoint.tensors) == set(state)
            for rank in range(target.world):
                for name, tensor in state.items():
                    shape = tuple(tensor.shape)
                    assert checkpoint.global_shape(name) == shape and checkpoint.dtype(name) == tensor.dtype
                    box = held(target, rank, shape, dims[name])
                    part = checkpoint.read(name, box)
                    assert part.shape == box.shape and part.dtype == tensor.dtype
                    assert torch.equal(bits(part), bits(tensor[box.relative_to(Box.whole(shape))]))
            assert checkpoint.verify() == []


def test_shards_are_ordinary_safetensors_and_reads_share_nothing(tmp_path):
    vault = Vault(tmp_path)
    data = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    flag = torch.tensor(True)
    writer = vault.writer(1, "a")
    slices = writer.write_shard(
        0,
        [
            Piece("flag", (), Box.whole(()), flag),
            Piece("w", (3, 8), Box((0, 0), (3, 4)), data),
            Piece("w", (3, 8), Box((0, 4), (3, 4)), data.T.contiguous().T),
        ],
    )
    path = writer.commit(slices, {})
    loaded = load_file(f"{path}/shard-00000.safetensors")
    assert torch.equal(loaded["flag"], flag) and torch.equal(loaded["w[0:3,4:8]"], data)
    checkpoint = vault.latest_intact()
    first = checkpoint.read("w", Box((1, 2), (2, 4)))
    first.zero_()
    with ThreadPoolExecutor(8) as pool:
        for part in pool.map(lambda _: checkpoint.read("w", Box((1, 2), (2, 4))), range(64)):
            assert torch.equal(part, torch.cat([data, data], 1)[1:, 2:6])
    with pytest.raises(CheckpointError, match="no tensor 'v'"):
        checkpoint.read("v")
    with pytest.raises(CheckpointError, match="exceeds"):
        checkpoint.read("w", Box((0, 0), (4, 1)))


def test_only_touched_slices_are_read(tmp_path):
    vault, whole = Vault(tmp_path), torch.arange(40.0).reshape(8, 5)
    slices = []
    for index in range(4):
        box = shard_rows((8, 5), index, 4)
        piece = Piece("w", (8, 5), box, whole[box.relative_to(Box.whole((8, 5)))])
        slices += vault.writer(1, "a").write_shard(index, [piece])
    path = vault.writer(1, "a").commit(slices, {})
    checkpoint = vault.latest_intact()
    with open(f"{path}/shard-00003.safetensors", "r+b") as out:
        out.seek(-1, 2)
        out.write(b"\xff")
    assert torch.equal(checkpoint.read("w", Box((1, 0), (4, 5))), whole[1:5])


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([Piece("w", (2,), Box((1,), (2,)), torch.zeros(2))], "exceeds"),
        ([Piece("w", (2,), Box((0,), (2,)), torch.zeros(3))], "shape"),
        ([Piece("w", (2,), Box((0,), (2,)), torch.zeros(2))] * 2, "twice"),
        ([Piece("w", (2,), Box((0,), (2,)), torch.zeros(2, device="meta"))], "copy it to the CPU"),
        ([Piece("w", (2,), Box((0,), (2,)), torch.zeros(2, dtype=torch.complex128))], "cannot be stored"),
    ],
)
def test_impossible_pieces_are_refused(tmp_path, pieces, message):
    with pytest.raises(CheckpointError, match=message):
        Vault(tmp_path).writer(1, "a").write_shard(0, pieces)


def test_incomplete_state_is_not_committed(tmp_path):
    vault = Vault(tmp_path)

    def attempt(expected=None, meta=None):
        writer = vault.writer(1, "a")
        slices = writer.write_shard(0, [Piece("w", (4, 2), Box((0, 0), (3, 2)), torch.zeros(3, 2))])
        if expected:
            slices += writer.write_shard(1, [Piece("w", (4, 2), Box((3, 0), (1, 2)), torch.zeros(1, 2))])
        writer.commit(slices, meta or {}, expected)

    for arguments, message in (
        ({}, r"w\[3:4,0:2\]"),
        ({"expected": {"w": (4, 2), "bias": (2,)}}, r"bias \(all of it\)"),
        ({"expected": {"w": (4, 3)}}, "written as"),
        ({"expected": {"w": (4, 2)}, "meta": {"x": float("nan")}}, "JSON"),
        ({"expected": {"w": (4, 2)}, "meta": {"x": (1, 2)}}, "JSON"),
    ):
        with pytest.raises(CheckpointError, match=message):
            attempt(**arguments)
        assert list((tmp_path / "checkpoints").iterdir()) == []
    attempt({"w": (4, 2)})
    assert vault.latest_intact().step == 1
