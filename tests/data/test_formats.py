from __future__ import annotations

import gzip
import json
import pickle
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tests.data import sets
from tests.data.pictures import corners, encode, pairs, write_shard

from planaria.config import DataConfig
from planaria.data.collate import VLMCollator
from planaria.data.errors import DataError
from planaria.data.files import File, local_file
from planaria.data.formats import FileDataset, open_files
from planaria.data.rows import Needs
from planaria.data.sample import Sample
from planaria.data.tokens import load_tokenizer
from planaria.recipe import BadSample, Dataset

PNG = encode(Image.new("RGB", (4, 4), "red"))
WRITERS: dict[str, Callable[[Path], Path]] = {
    "webdataset": lambda folder: sets.webdataset(folder, sets.twenty()),
    "parquet-struct": lambda folder: sets.parquet(folder, sets.twenty()),
    "parquet-bytes": lambda folder: sets.parquet(folder, sets.twenty(), struct_column=False),
    "hf": lambda folder: sets.hf(folder, sets.twenty()),
    "mds": lambda folder: sets.mds(folder, sets.twenty()),
    "mds-zstd": lambda folder: sets.mds(folder, sets.twenty(), sets.zstd),
    "json": lambda folder: sets.llava(folder, sets.twenty()),
    "jsonl": lambda folder: sets.llava(folder, sets.twenty(), lines=True),
}


def opened(path: Path, **keys: object) -> FileDataset:
    cache = (path if path.is_dir() else path.parent) / ".cache"
    tree = {"source": "files", "path": str(path), "prompt": "Say.", "cache_dir": str(cache), **keys}
    return open_files(str(path), DataConfig.model_validate(tree))


@pytest.mark.parametrize("kind", WRITERS)
def test_all_formats_give_the_same_samples(tmp_path: Path, kind: str) -> None:
    dataset = opened(WRITERS[kind](tmp_path))
    given = sets.twenty()
    assert isinstance(dataset, Dataset) and len(dataset) == 20
    assert sum(shard.samples for shard in dataset.shards) == 20
    collate = VLMCollator(load_tokenizer("bytes"), 4, 16, (0.5,) * 3, (0.5,) * 3, 64)
    plain = [
        Sample(key, np.full((8, 8, 3), level, np.uint8), "Say.", text) for level, (key, _, text) in enumerate(given)
    ]
    order = np.random.default_rng(0).permutation(20).tolist()
    found = {index: dataset[index] for index in order}
    batch, expected = collate([found[i] for i in range(20)], [1] * 20), collate(plain, [1] * 20)
    assert batch.targets == expected.targets
    for name, array in expected.arrays.items():
        assert np.array_equal(batch.arrays[name], array), name
    assert [found[i].key.rpartition("/")[2] for i in range(20)] == [key for key, _, _ in given]
    assert len({sample.key for sample in found.values()}) == 20
    for index in (-1, 20):
        with pytest.raises(IndexError, match="outside"):
            dataset[index]


@pytest.mark.parametrize("kind", WRITERS)
def test_pickled_and_read_by_threads(tmp_path: Path, kind: str) -> None:
    dataset = opened(WRITERS[kind](tmp_path))
    assert dataset[3].answer == "caption 3"
    copy = pickle.loads(pickle.dumps(dataset))
    order = np.random.default_rng(1).integers(0, 20, 100).tolist()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda i: copy[i].answer, order)) == [f"caption {i}" for i in order]
    copy.close()
    assert copy[19].answer == "caption 19"


def test_a_selected_hf_data_set_keeps_its_order(tmp_path: Path) -> None:
    dataset = opened(sets.hf(tmp_path, sets.twenty(), picked=[7, 0, 19]))
    assert [dataset[i].answer for i in range(3)] == ["caption 7", "caption 0", "caption 19"] and len(dataset) == 3
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    with pytest.raises(DataError, match="name row 20, but there are 20"):
        opened(sets.hf(wrong, sets.twenty(), picked=[20]))


def test_a_dict_of_splits_is_named_and_each_split_opens(tmp_path: Path) -> None:
    for split in ("train", "validation"):
        (tmp_path / split).mkdir()
        sets.hf(tmp_path / split, sets.twenty())
    with pytest.raises(DataError, match=r"several data sets: .*train, .*validation; set data\.path"):
        opened(tmp_path)
    assert len(opened(tmp_path / "validation")) == 20


@pytest.mark.parametrize("ending", ["tar.gz", "tgz", "tar.zst", "tar.bz2", "tar.xz"])
def test_compressed_tars_are_unpacked_once(tmp_path: Path, ending: str) -> None:
    import bz2
    import lzma

    plain = write_shard(tmp_path / "plain.tar", pairs(3)).read_bytes()
    (tmp_path / "plain.tar").unlink()
    pack = {"gz": gzip.compress, "tgz": gzip.compress, "zst": sets.zstd, "bz2": bz2.compress, "xz": lzma.compress}
    path = tmp_path / f"a.{ending}"
    path.write_bytes(pack[ending.rpartition(".")[2]](plain))
    dataset = opened(path)
    assert [dataset[i].answer for i in range(3)] == ["caption 0", "caption 1", "caption 2"]
    (copy,) = (tmp_path / ".cache").iterdir()
    made = copy.stat().st_ino
    assert opened(path)[1].answer == "caption 1" and copy.stat().st_ino == made
    damaged = pack[ending.rpartition(".")[2]](plain)
    (tmp_path / f"b.{ending}").write_bytes(damaged[: len(damaged) // 2])
    with pytest.raises(DataError, match=rf"b\.{ending}: (cannot be unpacked|truncated|not a readable)"):
        opened(tmp_path / f"b.{ending}")


def test_columns_are_guessed_and_can_be_named(tmp_path: Path) -> None:
    columns = {"photo_png": [PNG], "alt": ["a hat"], "q": ["What is it?"], "n": [1.5]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"no column is known to hold text; there are: photo_png \(bytes\), alt"):
        opened(tmp_path)
    with pytest.raises(DataError, match=r"no column 'foto'; there are: photo_png .*data\.columns\.image"):
        opened(tmp_path, columns={"text": "alt", "image": "foto"})
    sample = opened(tmp_path, columns={"text": "alt", "image": "photo_png", "prompt": "q"})[0]
    assert (sample.prompt, sample.answer) == ("What is it?", "a hat") and sample.image is not None


def test_pictures_by_path_by_list_and_none(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.png").write_bytes(PNG)
    rows = [
        {"images": [{"bytes": PNG, "path": None}], "question": "One?", "answer": "yes"},
        {"images": [{"bytes": None, "path": "sub/b.png"}] * 2, "question": "<image> or <image>?", "answer": "both"},
        {"images": [], "question": "None?", "answer": "none"},
        {"images": None, "question": "Null?", "answer": "null"},
        {"images": [{"bytes": None, "path": "gone.png"}], "question": "Gone?", "answer": "x"},
        {"images": [{"bytes": None, "path": None}], "question": "Neither?", "answer": "x"},
        {"images": [None], "question": "Null inside?", "answer": "x"},
        {"images": [{"bytes": PNG, "path": None}], "question": "<image><image>", "answer": "x"},
        {"images": [{"bytes": b"", "path": "sub/b.png"}], "question": "Empty?", "answer": "x"},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    dataset = opened(tmp_path)
    assert [len(dataset[i].images) for i in range(4)] == [1, 2, 0, 0]
    assert dataset[1].conversation[0].prompt == ("", " or ", "?")
    causes = ["gone.png cannot be read", "neither bytes nor a path", "image 1 of several is null", "2 <image> marks"]
    for index, cause in enumerate([*causes, "image is empty"], 4):
        with pytest.raises(BadSample, match=cause):
            dataset[index]


def test_a_caption_of_no_picture_is_no_sample(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": pa.array([PNG, None]), "caption": ["a", "b"]}), tmp_path / "a.parquet")
    dataset = opened(tmp_path)
    assert dataset[0].answer == "a"
    with pytest.raises(BadSample, match="there is no image"):
        dataset[1]


def test_needs_of_the_model_make_bad_samples(tmp_path: Path) -> None:
    rows = [{"images": [PNG] * count, "question": "How many?", "answer": str(count)} for count in (0, 1, 3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    config = DataConfig.model_validate({"source": "files", "path": str(tmp_path)})
    pairs_only = open_files(str(tmp_path), config, Needs(least=1, most=1))
    assert pairs_only[1].answer == "1"
    with pytest.raises(BadSample, match="there is no image"):
        pairs_only[0]
    with pytest.raises(BadSample, match="there are 3 images, and the model takes 1"):
        pairs_only[2]
    with pytest.raises(BadSample, match=r"has 3 images, and data\.max_length has room for 2"):
        open_files(str(tmp_path), config, Needs(most_at_once=2))[2]


def test_mds_of_other_encodings(tmp_path: Path) -> None:
    import struct

    raw = np.asarray(corners())
    pil = struct.pack("<III", 24, 16, 3) + b"RGB" + raw.tobytes()
    turns = json.dumps([{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "Colours."}])
    rows = [{"image": pil, "messages": turns.encode(), "n": struct.pack("<q", 7), "x": b"\x80pickle"}] * 2
    columns = {"image": "pil", "messages": "json", "n": "int", "x": "pkl"}
    sample = opened(sets.write_mds(tmp_path, rows, columns, sizes={"n": 8}), columns={"key": "n"})[1]
    assert sample.image is not None and np.array_equal(sample.image, raw)
    assert (sample.answer, sample.key) == ("Colours.", "shard.00001.mds/7")
    with pytest.raises(BadSample, match="encoding 'pkl', which is not read"):
        opened(tmp_path, columns={"key": "x"})[0]


def damaged(tmp_path: Path, kind: str, name: str, data: bytes | Callable[[bytes], bytes]) -> Path:
    path = WRITERS[kind](tmp_path)
    file = tmp_path / name
    file.write_bytes(data(file.read_bytes()) if callable(data) else data)
    return path


@pytest.mark.parametrize(
    ("kind", "name", "data", "told"),
    [
        ("parquet-struct", "p-1.parquet", b"PAR1 no more", r"p-1\.parquet: not a readable Parquet file"),
        ("parquet-struct", "p-1.parquet", lambda d: d[:-100], r"p-1\.parquet: not a readable Parquet file"),
        ("hf", "data-00001-of-00002.arrow", lambda d: d[: len(d) // 2], r"data-00001.*: not a readable Arrow file"),
        ("hf", "data-00001-of-00002.arrow", b"", r"data-00001.*: not a readable Arrow file"),
        ("hf", "state.json", b"{", r"state\.json: not the state of a saved data set"),
        ("hf", "state.json", b'{"_data_files": [{"filename": "x.arrow"}]}', r"x\.arrow: not there, but .*names it"),
        ("mds", "index.json", b"{", r"index\.json: not an index of MDS shards"),
        ("mds", "index.json", b'{"version": 2, "shards": []}', "no samples"),
        ("mds", "shard.00001.mds", lambda d: d[:-9], r"shard\.00001\.mds: has \d+ bytes, but .*index\.json says"),
        ("mds", "index.json", lambda d: d.replace(b'"mds"', b'"jsonl"'), "describes format 'jsonl'"),
        ("json", "train.json", lambda d: d[: len(d) // 2], r"train\.json: not a JSON list of records"),
        ("json", "train.json", b"[]", "no samples in 1 file"),
        ("json", "train.json", b"{\n}\n", "not valid JSON.*write one JSON record per line"),
        ("json", "train.json", '[{"a": "\u00e4"}]'.encode("latin-1"), "not UTF-8"),
        (
            "webdataset",
            "t-1.tar",
            lambda d: d[:2000],
            r"t-1\.tar: not a readable.* from offset 1546 on",
        ),
    ],
)
def test_a_damaged_set_is_told_at_once(
    tmp_path: Path, kind: str, name: str, data: bytes | Callable[[bytes], bytes], told: str
) -> None:
    with pytest.raises(DataError, match=told):
        opened(damaged(tmp_path, kind, name, data))


def test_damage_inside_a_shard_costs_its_samples(tmp_path: Path) -> None:
    def harm(data: bytes) -> bytes:
        return data[:900] + bytes(len(data) - 900)

    dataset = opened(damaged(tmp_path, "mds", "shard.00000.mds", harm))
    with pytest.raises(BadSample, match=r"is truncated or damaged|bytes more than its columns"):
        dataset[9]
    assert dataset[10].answer == "caption 10"
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    dataset = opened(damaged(tmp_path, "parquet-struct", "p-0.parquet", lambda d: bytes(300) + d[300:]))
    with pytest.raises(BadSample, match=r"row group 0 of p-0\.parquet cannot be read"):
        dataset[0]
    assert dataset[10].answer == "caption 10"
    lines = [b'{"id": 1, "image": "x", "caption": "a"}', b"{oops", b"[1]", b""]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    dataset = opened(tmp_path / "a.jsonl")
    assert len(dataset) == 3
    for index, cause in enumerate(["image .*x cannot be read", "the record is not valid JSON", "no mapping but list"]):
        with pytest.raises(BadSample, match=cause):
            dataset[index]


def test_pictures_beside_a_file_are_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def look(path: str | Path) -> File:
        seen.append(Path(path).name)
        return local_file(path)

    sets.llava(tmp_path, sets.twenty())
    monkeypatch.setattr("planaria.data.files.local_file", look)
    assert len(opened(tmp_path)) == 20 and seen == ["train.json"]


def test_files_of_several_formats_or_of_none_are_refused(tmp_path: Path) -> None:
    sets.webdataset(tmp_path, sets.twenty())
    sets.parquet(tmp_path, sets.twenty())
    with pytest.raises(DataError, match=r"several formats \(2 parquet, 2 webdataset\); set data\.format"):
        opened(tmp_path)
    assert len(opened(tmp_path, format="parquet")) == 20 == len(opened(tmp_path / "*.tar"))
    with pytest.raises(DataError, match="no file of the format mds among 4"):
        opened(tmp_path, format="mds")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.csv").write_text("a,b")
    with pytest.raises(DataError, match=r"no file of a known format \(x\.csv\)"):
        opened(tmp_path / "other")
    with pytest.raises(DataError, match="no file matches"):
        opened(tmp_path / "gone")
    pq.write_table(pa.table({"caption": ["x"]}), tmp_path / "p-2.parquet")
    with pytest.raises(DataError, match=r"p-2\.parquet: has the columns caption \(text\), but p-0"):
        opened(tmp_path, format="parquet")
