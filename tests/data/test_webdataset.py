from __future__ import annotations

import json
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.data.pictures import encode, noise, pairs, write_shard

from planaria.data.errors import DataError
from planaria.data.webdataset import MAX_OPEN, WebDataset
from planaria.recipe import BadSample, Dataset

EMOJI = Path(__file__).resolve().parents[2] / ".." / "shared" / "data" / "emoji"
PNG = encode(Image.new("RGB", (4, 4), "red"))


def open_files(folder: Path) -> int:
    """How many files below ``folder`` this process has open."""
    links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link).startswith(str(folder)) for link in links if link.is_symlink())


def shard_with(tmp_path: Path, *members: tuple[str, bytes]) -> WebDataset:
    write_shard(tmp_path / "a.tar", members)
    return WebDataset(str(tmp_path / "a.tar"), "Say.", backoff=(0.0, 0.0))


def test_samples_come_in_the_order_of_the_sorted_shards(tmp_path: Path) -> None:
    write_shard(tmp_path / "t-1.tar", pairs(2))
    write_shard(tmp_path / "t-0.tar", pairs(3))
    write_shard(tmp_path / "t-2.tar", [])  # an empty shard is no error as long as another has samples
    dataset = WebDataset(str(tmp_path / "t-*.tar"), "Say.")
    assert isinstance(dataset, Dataset) and len(dataset) == 5
    keys = [dataset[i].key for i in range(5)]
    assert keys == ["t-0.tar/s0000", "t-0.tar/s0001", "t-0.tar/s0002", "t-1.tar/s0000", "t-1.tar/s0001"]
    sample = dataset[2]
    assert (sample.prompt, sample.answer, sample.choices) == ("Say.", "caption 2", ())
    assert sample.image is not None and sample.image.shape == (8, 8, 3) and (sample.image == 2).all()
    for index in (-1, 5):
        with pytest.raises(IndexError, match="outside"):
            dataset[index]


def test_real_pairs() -> None:
    if not EMOJI.is_dir():
        pytest.skip("the emoji shards are not on this machine (../shared/data/emoji)")
    dataset = WebDataset(str(EMOJI / "train-*.tar"), "Say.")
    val = WebDataset(str(EMOJI / "val-*.tar"), "Say.")
    assert (len(dataset), len(val)) == (1720, 191)
    for index in range(0, 1720, 43):
        sample = dataset[index]
        assert sample.image is not None and sample.image.shape == (64, 64, 3) and sample.image.std() > 0
        assert (sample.image[[0, 0, -1, -1], [0, -1, 0, -1]] == 255).all(axis=1).any()  # transparent corners: white
    assert dataset[0].answer == "troll" and dataset[0].key == "train-00000.tar/1f9cc"


@pytest.mark.parametrize("extension", ["png", "jpg", "jpeg", "webp", "gif", "bmp", "JPG", "Png"])
def test_image_extensions_in_any_case(tmp_path: Path, extension: str) -> None:
    sample = shard_with(tmp_path, (f"a.{extension}", PNG), ("a.TXT", b"hi"))[0]
    assert sample.image is not None and sample.answer == "hi"


def test_captions(tmp_path: Path) -> None:
    dataset = shard_with(
        tmp_path,
        ("a.txt", "\ufeff ein Bär\n".encode()),
        ("a.png", PNG),
        ("b.json", json.dumps({"caption": "from json"}).encode()),
        ("b.png", PNG),
        ("c.json", b'{"caption": "not me"}'),
        ("c.txt", b"me"),
        ("c.png", PNG),
    )
    assert [dataset[i].answer for i in range(3)] == ["ein Bär", "from json", "me"]


@pytest.mark.parametrize(
    ("members", "cause"),
    [
        ([("a.png", PNG)], "no caption member"),
        ([("a.txt", b"hi")], "no image member"),
        ([("a.png", PNG), ("a.txt", "B\u00e4r".encode("latin-1"))], "not UTF-8"),
        ([("a.png", PNG), ("a.txt", b" \n")], "caption is empty"),
        ([("a.png", PNG), ("a.json", b"{")], "not valid JSON"),
        ([("a.png", PNG), ("a.json", b"[1]")], "no text under"),
        ([("a.png", PNG), ("a.json", b'{"caption": null}')], "no text under"),
        ([("a.png", PNG), ("a.json", b'{"caption": "\\ud83d"}')], "lone surrogate"),
        ([("a.jpg", b""), ("a.txt", b"hi")], "image is empty"),
        ([("a.jpg", b"<html></html>"), ("a.txt", b"hi")], "not a picture"),
        ([("a.jpg", encode(noise(), "JPEG")[:-900]), ("a.txt", b"hi")], "cannot be decoded"),
    ],
)
def test_a_damaged_sample_is_bad_when_read_and_spares_its_neighbours(
    tmp_path: Path, members: list[tuple[str, bytes]], cause: str
) -> None:
    dataset = shard_with(tmp_path, *members, *pairs(1))
    with pytest.raises(BadSample, match=cause) as caught:
        dataset[0]
    assert caught.value.key == "a.tar/a"
    assert dataset[1].answer == "caption 0"


def test_missing_and_empty_patterns_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere-\*\.tar: no file matches; check the path"):
        WebDataset(str(tmp_path / "nowhere-*.tar"), "Say.")
    write_shard(tmp_path / "a.tar", [("README", b"x")])
    with pytest.raises(DataError, match="no samples in 1 shard"):
        WebDataset(str(tmp_path / "a.tar"), "Say.")
    (tmp_path / "b.tar").write_bytes(b"no tar at all")
    with pytest.raises(DataError, match=r"b\.tar: not a readable") as caught:
        WebDataset(str(tmp_path / "*.tar"), "Say.")
    assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args


def test_a_shard_that_vanishes_or_shrinks_costs_its_samples_only(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.tar", pairs(2))
    write_shard(tmp_path / "b.tar", pairs(2))
    dataset = WebDataset(str(tmp_path / "*.tar"), "Say.", backoff=(0.0,))
    os.truncate(tmp_path / "a.tar", 3 * 1024 + 520)  # inside the caption of the second sample
    assert dataset[0].answer == "caption 0"
    with pytest.raises(BadSample, match=r"is truncated: 8 of 9 bytes at offset 3584"):
        dataset[1]
    dataset.close()
    os.remove(tmp_path / "a.tar")
    with pytest.raises(BadSample, match=r"a\.tar cannot be read \(No such file"):
        dataset[0]
    assert dataset[2].answer == "caption 0"


def test_transient_trouble_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shard(tmp_path / "a.tar", pairs(1))
    dataset = WebDataset(str(tmp_path / "a.tar"), "Say.", backoff=(0.5, 2.0))
    waits: list[float] = []

    def come_back(wait: float) -> None:
        waits.append(wait)
        if len(waits) == 2:
            (tmp_path / "away.tar").rename(tmp_path / "a.tar")

    monkeypatch.setattr("planaria.data.webdataset.time.sleep", come_back)
    (tmp_path / "a.tar").rename(tmp_path / "away.tar")
    assert dataset[0].answer == "caption 0" and waits == [0.5, 2.0]


def test_handles_are_bounded_and_reopened_after_pickling(tmp_path: Path) -> None:
    shards = MAX_OPEN + 5
    for i in range(shards):
        write_shard(tmp_path / f"{i:03d}.tar", pairs(1))
    dataset = WebDataset(str(tmp_path / "*.tar"), "Say.")
    for _ in range(2):
        assert all(dataset[i].answer == "caption 0" for i in range(shards))
    assert open_files(tmp_path) == MAX_OPEN
    copy = pickle.loads(pickle.dumps(dataset))
    assert open_files(tmp_path) == MAX_OPEN and copy[3].key == dataset[3].key
    dataset.close()
    copy.close()
    assert open_files(tmp_path) == 0


def test_threads_may_share_it(tmp_path: Path) -> None:
    for i in range(MAX_OPEN * 2):
        write_shard(tmp_path / f"{i:03d}.tar", pairs(4))
    dataset = WebDataset(str(tmp_path / "*.tar"), "Say.")
    order = np.random.default_rng(0).integers(0, len(dataset), 2000).tolist()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: dataset[i].answer, order))
    assert found == [f"caption {i % 4}" for i in order]
    assert open_files(tmp_path) <= MAX_OPEN
