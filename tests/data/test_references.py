"""Each format against the library it comes from, where that is installed; Planaria itself needs none of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.data import sets
from tests.data.pictures import corners, encode

from planaria.config import DataConfig
from planaria.data.formats import FileDataset, open_files

EMOJI = Path(__file__).resolve().parents[2] / ".." / "shared" / "data" / "emoji"
Read = list[tuple[Image.Image, str]]


def opened(path: Path, **keys: object) -> FileDataset:
    tree = {"source": "files", "path": str(path), "prompt": "Say.", **keys}
    return open_files(str(path), DataConfig.model_validate(tree))


def assert_same(dataset: FileDataset, theirs: Read) -> None:
    assert len(dataset) == len(theirs) > 0
    for index, (image, caption) in enumerate(theirs):
        mine = dataset[index]
        assert mine.answer == caption and mine.image is not None
        assert np.array_equal(mine.image, np.asarray(image.convert("RGB")))


def pictures() -> Iterator[tuple[Image.Image, str]]:
    for number in range(7):
        yield corners(8 + 2 * number, 8).rotate(90 * number), f"caption {number} äöü"


def test_webdataset(tmp_path: Path) -> None:
    wds = pytest.importorskip("webdataset")
    with wds.ShardWriter(str(tmp_path / "%03d.tar"), maxcount=3, verbose=0) as writer:
        for number, (image, caption) in enumerate(pictures()):
            writer.write({"__key__": f"{number:03d}", "png": encode(image), "txt": caption})
    urls = sorted(map(str, tmp_path.glob("*.tar")))
    read = wds.WebDataset(urls, shardshuffle=False).decode("pil").to_tuple("png", "txt")
    assert_same(opened(tmp_path), list(read))


def test_webdataset_on_real_pairs() -> None:
    wds = pytest.importorskip("webdataset")
    if not EMOJI.is_dir():
        pytest.skip("the emoji shards are not on this machine (../shared/data/emoji)")
    path = EMOJI / "val-00000.tar"
    mine = opened(path)
    read = wds.WebDataset([str(path)], shardshuffle=False).decode("pilrgba").to_tuple("__key__", "png", "txt")
    theirs: list[Any] = list(read)
    assert [mine[i].key for i in range(len(mine))] == [f"{path.name}/{key}" for key, _, _ in theirs]
    white = [Image.alpha_composite(Image.new("RGBA", i.size, "white"), i) for _, i, _ in theirs]
    assert_same(mine, [(image, text.strip()) for image, (_, _, text) in zip(white, theirs, strict=True)])


def test_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    images, captions = zip(*pictures(), strict=True)
    features = datasets.Features({"image": datasets.Image(), "caption": datasets.Value("string")})
    whole = datasets.Dataset.from_dict({"image": list(images), "caption": list(captions)}, features=features)
    for name, part in {"plain": whole, "shuffled": whole.shuffle(seed=1), "two files": whole}.items():
        part.save_to_disk(tmp_path / name, num_shards=2 if name == "two files" else 1)
        read = datasets.load_from_disk(str(tmp_path / name))
        assert_same(opened(tmp_path / name), [(row["image"], row["caption"]) for row in read])
    whole.to_parquet(tmp_path / "parquet" / "a.parquet")
    assert_same(opened(tmp_path / "parquet"), [(row["image"], row["caption"]) for row in whole])


@pytest.mark.parametrize("compression", [None, "zstd", "gz"])
@pytest.mark.parametrize("encoding", ["png", "pil"])
def test_mosaicml_streaming(tmp_path: Path, compression: str | None, encoding: str) -> None:
    streaming = pytest.importorskip("streaming.base.format.mds")
    columns = {"image": encoding, "caption": "str", "number": "int"}
    with streaming.MDSWriter(out=str(tmp_path), columns=columns, compression=compression, size_limit=800) as writer:
        for number, (image, caption) in enumerate(pictures()):
            writer.write({"image": image, "caption": caption, "number": number})
    mine = opened(tmp_path, cache_dir=str(tmp_path / "cache"), columns={"key": "number"})
    assert len(mine.shards) > 1
    assert_same(mine, list(pictures()))
    assert mine[6].key.endswith("/6")


def test_what_the_tests_write_is_what_the_libraries_read(tmp_path: Path) -> None:
    """The hand-written fixtures of the other tests are no dialect of our own."""
    datasets = pytest.importorskip("datasets")
    streaming = pytest.importorskip("streaming.base.format")
    for name in ("hf", "mds"):
        (tmp_path / name).mkdir()
    captions = [text for _, _, text in sets.twenty()]
    read = datasets.load_from_disk(str(sets.hf(tmp_path / "hf", sets.twenty())))
    assert [row["caption"] for row in read] == captions
    index = json.loads((sets.mds(tmp_path / "mds", sets.twenty()) / "index.json").read_text())
    shards = [streaming.reader_from_json(str(tmp_path / "mds"), "", entry) for entry in index["shards"]]
    assert [shard[at]["caption"] for shard in shards for at in range(shard.samples)] == captions
