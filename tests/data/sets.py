"""The same pairs in every format, written by hand, without the formats' own libraries."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tests.data.pictures import pairs, write_shard

Pair = tuple[str, bytes, str]
"""Key, PNG, caption."""


def twenty() -> list[Pair]:
    members = pairs(20)
    return [
        (image.removesuffix(".png"), png, text.decode())
        for (image, png), (_, text) in zip(members[::2], members[1::2], strict=True)
    ]


def webdataset(folder: Path, given: Sequence[Pair]) -> Path:
    half = len(given) // 2
    for number, part in enumerate((given[:half], given[half:])):
        members = [m for key, png, text in part for m in ((f"{key}.png", png), (f"{key}.txt", text.encode()))]
        write_shard(folder / f"t-{number}.tar", members)
    return folder


def table(given: Sequence[Pair], struct_column: bool = True) -> pa.Table:
    keys, pngs, texts = zip(*given, strict=True)
    images = [{"bytes": png, "path": f"{key}.png"} for key, png in zip(keys, pngs, strict=True)]
    return pa.table({"id": keys, "image": images if struct_column else list(pngs), "caption": texts})


def parquet(folder: Path, given: Sequence[Pair], struct_column: bool = True) -> Path:
    half = len(given) // 2
    for number, part in enumerate((given[:half], given[half:])):
        pq.write_table(table(part, struct_column), folder / f"p-{number}.parquet", row_group_size=3)
    return folder


def hf(folder: Path, given: Sequence[Pair], picked: Sequence[int] | None = None) -> Path:
    """As ``Dataset.save_to_disk`` leaves it, with the cache of a transformation beside it."""
    half = len(given) // 2
    names = []
    for number, part in enumerate((given[:half], given[half:])):
        names.append(f"data-{number:05d}-of-00002.arrow")
        write_arrow(folder / names[-1], table(part))
    write_arrow(folder / "cache-0123456789abcdef.arrow", table(given))
    state: dict[str, object] = {"_data_files": [{"filename": name} for name in names], "_indices_files": None}
    state |= dict.fromkeys(("_format_columns", "_format_type", "_split")) | {"_format_kwargs": {}}
    state |= {"_fingerprint": "0123456789abcdef", "_output_all_columns": False}
    if picked is not None:
        write_arrow(folder / "indices.arrow", pa.table({"indices": pa.array(picked, pa.uint64())}))
        state["_indices_files"] = [{"filename": "indices.arrow"}]
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def write_arrow(path: Path, content: pa.Table, rows: int = 4) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, content.schema) as writer:
        writer.write_table(content, max_chunksize=rows)


def mds(folder: Path, given: Sequence[Pair], compress: Callable[[bytes], bytes] | None = None) -> Path:
    rows = [{"caption": text.encode(), "id": key.encode(), "image": png} for key, png, text in given]
    columns = {"caption": "str", "id": "str", "image": "png"}
    return write_mds(folder, rows, columns, compress)


def write_mds(
    folder: Path,
    rows: Sequence[Mapping[str, bytes]],
    columns: Mapping[str, str],
    compress: Callable[[bytes], bytes] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Path:
    names = sorted(columns)
    sizes = sizes or {}
    shards = []
    half = max(1, len(rows) // 2)
    for number, part in enumerate((rows[:half], rows[half:])):
        header = b'{"columns": "described here too"}'
        samples = []
        for row in part:
            lengths = [len(row[name]) for name in names if name not in sizes]
            samples.append(struct.pack(f"<{len(lengths)}I", *lengths) + b"".join(row[name] for name in names))
        at = 4 + 4 * (len(part) + 1) + len(header)
        offsets = [at]
        for sample in samples:
            offsets.append(offsets[-1] + len(sample))
        raw = struct.pack(f"<{len(offsets) + 1}I", len(part), *offsets) + header + b"".join(samples)
        name = f"shard.{number:05d}.mds"
        entry: dict[str, object] = {
            "version": 2,
            "format": "mds",
            "samples": len(part),
            "column_names": names,
            "column_encodings": [columns[name] for name in names],
            "column_sizes": [sizes.get(name) for name in names],
            "compression": None,
            "hashes": [],
            "size_limit": 1 << 26,
            "raw_data": {"basename": name, "bytes": len(raw), "hashes": {}},
            "zip_data": None,
        }
        if compress:
            packed = compress(raw)
            entry["compression"] = "zstd"
            entry["zip_data"] = {"basename": f"{name}.zstd", "bytes": len(packed), "hashes": {}}
            (folder / f"{name}.zstd").write_bytes(packed)
        else:
            (folder / name).write_bytes(raw)
        shards.append(entry)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return folder


def llava(folder: Path, given: Sequence[Pair], lines: bool = False) -> Path:
    (folder / "pictures").mkdir()
    records = []
    for key, png, text in given:
        (folder / "pictures" / f"{key}.png").write_bytes(png)
        turns = [{"from": "human", "value": "<image>\nSay."}, {"from": "gpt", "value": text}]
        records.append({"id": key, "image": f"pictures/{key}.png", "conversations": turns})
    path = folder / ("train.jsonl" if lines else "train.json")
    write_records(path, records)
    return path


def write_records(path: Path, records: Sequence[object]) -> Path:
    text = "".join(json.dumps(r) + "\n" for r in records) if path.name.endswith("l") else json.dumps(records, indent=1)
    path.write_text(text)
    return path


def zstd(data: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(data))
