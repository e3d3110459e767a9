from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import pytest
from tests.data.pictures import pairs, write_shard

from planaria.data.errors import DataError
from planaria.data.tarindex import index_shard, split_key


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("a.jpg", ("a", "jpg")),
        ("a.JPG", ("a", "jpg")),
        ("a.b.jpg", ("a", "b.jpg")),
        ("v1.0/x.jpg", ("v1.0/x", "jpg")),
        ("./d/x.txt", ("d/x", "txt")),
        ("README", None),
        ("d/.DS_Store", None),
        ("._a.jpg", None),
        ("a.", None),
    ],
)
def test_split_key(name: str, parts: tuple[str, str] | None) -> None:
    assert split_key(name) == parts


def test_spans_point_at_the_bytes(tmp_path: Path) -> None:
    members = [*pairs(3), ("d.ir/" + "long" * 60 + ".txt", b"far"), ("README", b"no sample")]
    shard = write_shard(tmp_path / "a.tar", members)
    data, expected = shard.read_bytes(), dict(members)
    entries = index_shard(shard)
    assert [entry.key for entry in entries] == ["s0000", "s0001", "s0002", "d.ir/" + "long" * 60]
    for entry in entries:
        assert entry.text is not None and entry.json is None
        assert data[entry.text.offset : entry.text.offset + entry.text.size] == expected[entry.key + ".txt"]
    assert entries[3].image is None


def test_directories_and_links_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for name, kind in (("d", tarfile.DIRTYPE), ("d/l.jpg", tarfile.SYMTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "d/x.jpg"
            tar.addfile(info)
        info = tarfile.TarInfo("d/x.txt")
        info.size = 2
        tar.addfile(info, io.BytesIO(b"hi"))
    assert [(entry.key, entry.image) for entry in index_shard(path)] == [("d/x", None)]


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (["a.jpg", "a.txt", "a.jpg", "a.txt"], "key 'a' occurs twice"),
        (["a.jpg", "a.txt", "b.jpg", "a.jpg"], "key 'a' occurs twice"),
        (["a.jpg", "a.JPG"], "key 'a' occurs twice"),
        (["d/a.jpg", "b.jpg", "d/a.txt"], "key 'd/a' do not lie together"),
        (["2020.01.jpg", "2020.01.txt", "2020.02.jpg", "2020.02.txt"], "key '2020' has 01.jpg and 02.jpg"),
        (["a.jpg", "a.png"], "key 'a' has jpg and png"),
    ],
)
def test_confused_keys_are_named_at_indexing(tmp_path: Path, names: list[str], what: str) -> None:
    shard = write_shard(tmp_path / "bad.tar", [(name, b"x") for name in names])
    with pytest.raises(DataError, match=what) as caught:
        index_shard(shard)
    assert caught.value.where == str(shard) and caught.value.remedy


def test_the_same_base_name_in_two_directories_is_two_samples(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "a.tar", [(f"{d}/x.{e}", b"x") for d in ("v1.0", "v1.1") for e in ("jpg", "txt")])
    assert [(entry.key, entry.image is not None, entry.text is not None) for entry in index_shard(shard)] == [
        ("v1.0/x", True, True),
        ("v1.1/x", True, True),
    ]


def test_dots_in_names_still_pair_and_a_plain_picture_wins(tmp_path: Path) -> None:
    members = [("a.b.jpg", b"1"), ("a.b.txt", b"22"), ("c.jpg", b"333"), ("c.seg.png", b"4444"), ("c.txt", b"55555")]
    entries = index_shard(write_shard(tmp_path / "a.tar", members))
    sizes = [(e.key, e.image and e.image.size, e.text and e.text.size) for e in entries]
    assert sizes == [("a", 1, 2), ("c", 3, 5)]


def test_damaged_shards_are_named_with_offset_and_remedy(tmp_path: Path) -> None:
    whole = write_shard(tmp_path / "ok.tar", pairs(4)).read_bytes()
    second = 2 * 1024  # each member takes a header block and a data block
    damaged = {
        "empty": (b"", "offset 0"),
        "html": (b"<html>404 not found</html>" * 40, "offset 0"),
        "short-html": (b"<html>404</html>", "offset 0"),
        "gzip": (gzip.compress(whole), "offset 0"),
        "in-header": (whole[: second + 100], f"offset {second}"),
        "in-data": (whole[: second + 520], "truncated: 's0001.png' should end at byte"),
        "at-border": (whole[:second], f"no end-of-archive mark at offset {second}"),
        "bad-header": (whole[:second] + b"\xff" * 512 + whole[second + 512 :], f"header at offset {second}"),
    }
    for name, (data, what) in damaged.items():
        path = tmp_path / f"{name}.tar"
        path.write_bytes(data)
        with pytest.raises(DataError, match=what) as caught:
            index_shard(path)
        assert caught.value.where == str(path) and "shard" in caught.value.remedy, name


def test_an_unreadable_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be read \(No such file"):
        index_shard(tmp_path / "gone.tar")
    with pytest.raises(DataError, match=r"cannot be read \(Is a directory"):
        index_shard(tmp_path)
