"""Directories that are damaged, or that mean harm."""

from __future__ import annotations

import copyreg
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from planaria.exchange.dcp import DcpSource
from planaria.exchange.errors import ExchangeError

TENSORS = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(5, dtype=torch.bfloat16), "n": torch.tensor(3)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dcp.save(TENSORS | {"step": 7, "names": ["x"]}, checkpoint_id=tmp_path / "dcp")
    return tmp_path / "dcp"


def edit(folder: Path, change: Callable[[Any], Any]) -> None:
    path = folder / ".metadata"
    tree = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(change(tree) or tree))


def test_what_torch_writes_is_read(folder: Path) -> None:
    source = DcpSource(folder)
    assert source.shapes() == {"a": (3, 4), "b": (5,), "n": ()}
    for name, tensor in TENSORS.items():
        got = source.read(name)
        assert got.dtype == tensor.dtype and torch.equal(got, tensor)
    assert source.objects == {"step", "names"}
    assert (source.read_object("step"), source.read_object("names")) == (7, ["x"])


def test_every_dtype(tmp_path: Path) -> None:
    tensors = {
        str(dtype): torch.ones(2, dtype=dtype)
        for dtype in (torch.float64, torch.float16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool)
    }
    dcp.save(tensors, checkpoint_id=tmp_path / "dcp")
    source = DcpSource(tmp_path / "dcp")
    assert {name: str(source.read(name).dtype) for name in tensors} == {name: name for name in tensors}


def test_what_older_versions_wrote_is_read(folder: Path) -> None:
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

    def change(tree: Any) -> None:
        tree.state_dict_metadata["a"].properties = TensorProperties(dtype=torch.float32)
        del tree.__dict__["storage_meta"], tree.__dict__["version"]

    edit(folder, change)
    assert torch.equal(DcpSource(folder).read("a"), TENSORS["a"])


class Calls:
    """Pickles to a call."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def harm(marker: Path) -> list[bytes]:
    path = str(marker)
    return [
        pickle.dumps(Calls(os.system, f"touch {path}")),
        pickle.dumps(Calls(os.mkdir, path), protocol=0),
        pickle.dumps({"state_dict_metadata": Calls(exec, f"open({path!r}, 'w')")}),
        pickle.dumps(Calls(torch.load, path)),
        pickle.dumps(Calls(torch.hub.load, path)),
        pickle.dumps(Calls(getattr, "x", "upper")),
        b"cbuiltins\nopen\n(V" + path.encode() + b"\nVw\ntR.",  # GLOBAL, REDUCE
        b"(V" + path.encode() + b"\nVw\nibuiltins\nopen\n.",  # INST
        b"\x80\x04\x8c\x05torch\x8c\x0cload.__self__\x93.",  # STACK_GLOBAL of a dotted name
        b"\x80\x04\x8c\x05torch\x8c\x0b_utils.__dict__\x93.",
        b"ctorch.distributed.checkpoint.metadata\nos\n.",
        b"ctorch.distributed.checkpoint.filesystem\nFileSystemReader\n(V/\ntR.",
        b"V1\nP1\n.",  # PERSID
    ]


def test_no_code_of_a_metadata_pickle_is_run(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for raw in harm(marker):
        (folder / ".metadata").write_bytes(raw)
        with pytest.raises(ExchangeError, match=r"\.metadata: (refused: it names|damaged|holds no Metadata)"):
            DcpSource(folder)
        assert not marker.exists(), raw


def test_harm_inside_of_good_metadata_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    def change(tree: Any) -> None:
        tree.planner_data = Calls(os.system, f"touch {tmp_path / 'marker'}")

    edit(folder, change)
    with pytest.raises(ExchangeError, match=r"refused: it names posix\.system, .*Nothing of it was run"):
        DcpSource(folder)
    assert not (tmp_path / "marker").exists()


def test_what_a_pickle_does_to_a_stand_in_reaches_nobody(folder: Path) -> None:
    """BUILD with a slot state sets attributes, also of a class; the next file must not see them."""
    name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    poisoned = name + b"(N(dVstorage_data\nVharm\nstb."
    original = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(poisoned)
    with pytest.raises(ExchangeError):
        DcpSource(folder)
    assert not hasattr(dcp.metadata.Metadata, "storage_data") or dcp.metadata.Metadata.storage_data is None
    (folder / ".metadata").write_bytes(original)
    assert torch.equal(DcpSource(folder).read("a"), TENSORS["a"])


@pytest.mark.parametrize("code", [(b"\x82\x01", 1)])
def test_extension_codes(folder: Path, code: tuple[bytes, int]) -> None:
    copyreg.add_extension("os", "system", 1)
    try:
        (folder / ".metadata").write_bytes(b"\x80\x02" + code[0] + b"X\x04\x00\x00\x00true\x85R.")
        with pytest.raises(ExchangeError, match="refused"):
            DcpSource(folder)
    finally:
        copyreg.remove_extension("os", "system", 1)


def place(tree: Any, name: str) -> tuple[MetadataIndex, _StorageInfo]:
    return next((index, info) for index, info in tree.storage_data.items() if index.fqn == name)


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "x/../../secret", "", "a\x00b"])
def test_a_path_that_leads_outside(folder: Path, path: str) -> None:
    def change(tree: Any) -> None:
        place(tree, "a")[1].relative_path = path

    edit(folder, change)
    with pytest.raises(ExchangeError, match="refused: it points to"):
        DcpSource(folder)


def test_metadata_that_is_not_as_torch_writes_it(folder: Path) -> None:
    original = (folder / ".metadata").read_bytes()

    def broken(change: Callable[[Any], Any]) -> str:
        (folder / ".metadata").write_bytes(original)
        edit(folder, change)
        with pytest.raises(ExchangeError) as caught:
            DcpSource(folder)
        return str(caught.value)

    def lose_place(tree: Any) -> None:
        del tree.storage_data[place(tree, "a")[0]]

    def lose_chunk(tree: Any) -> None:
        tree.state_dict_metadata["a"].chunks.clear()

    def widen(tree: Any) -> None:
        tree.state_dict_metadata["a"].size = torch.Size((2, 4))

    def transform(tree: Any) -> None:
        place(tree, "a")[1].transform_descriptors = ["stream.zstd"]

    def offset(tree: Any) -> None:
        place(tree, "a")[1].offset = -4

    assert "not in the form" in broken(lose_place)
    assert "no file holds a[0:3,0:4]" in broken(lose_chunk)
    assert "a[0:3,0:4] exceeds its tensor of shape [2, 4]" in broken(widen)
    assert "transformed (stream.zstd)" in broken(transform)
    assert "refused: it points to" in broken(offset)
    assert "holds no Metadata" in broken(lambda tree: {"a": 1})
    assert "not in the form" in broken(lambda tree: setattr(tree, "storage_data", None))
    (folder / ".metadata").write_bytes(original[:100])
    with pytest.raises(ExchangeError, match="damaged, or no metadata"):
        DcpSource(folder)


def test_files_that_are_missing_or_short_are_all_named(folder: Path) -> None:
    data = folder / "__0_0.distcp"
    size = data.stat().st_size
    with data.open("r+b") as file:
        file.truncate(size - 10)
    with pytest.raises(ExchangeError, match=rf"__0_0\.distcp: {size - 10} bytes, \.metadata says at least {size}"):
        DcpSource(folder)
    data.unlink()
    with pytest.raises(ExchangeError, match=r"__0_0\.distcp: missing\ncopy the directory again"):
        DcpSource(folder)


def replace(folder: Path, name: str, value: Any) -> None:
    """Put another archive in place of ``name``."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    with (folder / "__0_0.distcp").open("ab") as file:
        offset = file.tell()
        file.write(buffer.getvalue())

    def change(tree: Any) -> None:
        info = place(tree, name)[1]
        info.offset, info.length = offset, len(buffer.getvalue())

    edit(folder, change)


def test_an_archive_that_is_not_what_metadata_says(folder: Path, tmp_path: Path) -> None:
    replace(folder, "a", torch.zeros(2, 2))
    with pytest.raises(ExchangeError, match=r"__0_0\.distcp: a\[0:3,0:4\]: holds torch\.float32 \[2, 2\], but"):
        DcpSource(folder).read("a")
    replace(folder, "a", [1, 2])
    with pytest.raises(ExchangeError, match="a list where a tensor belongs"):
        DcpSource(folder).read("a")
    replace(folder, "a", Calls(os.system, f"touch {tmp_path / 'marker'}"))
    with pytest.raises(ExchangeError, match="a: refused, or damaged"):
        DcpSource(folder).read("a")
    assert not (tmp_path / "marker").exists()


def test_a_damaged_archive(folder: Path) -> None:
    data = folder / "__0_0.distcp"
    raw = data.read_bytes()
    tree = pickle.loads((folder / ".metadata").read_bytes())
    info = place(tree, "a")[1]
    data.write_bytes(raw[: info.offset] + bytes(info.length) + raw[info.offset + info.length :])
    with pytest.raises(ExchangeError, match=r"__0_0\.distcp: a: (damaged|refused)"):
        DcpSource(folder).read("a")
    at = info.offset + raw[info.offset :].index(TENSORS["a"].numpy().tobytes())
    data.write_bytes(raw[:at] + b"\xff" + raw[at + 1 :])
    with pytest.raises(ExchangeError, match=r"__0_0\.distcp: a: damaged .*CRC"):
        DcpSource(folder).read("a")


def test_archives_without_checksums_are_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        dcp.save(TENSORS, checkpoint_id=tmp_path / "dcp")
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(DcpSource(tmp_path / "dcp").read("a"), TENSORS["a"])
