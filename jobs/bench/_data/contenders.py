"""Streams of batches of equal content: one loading process each, read ahead, in its own library's ordinary way."""

from __future__ import annotations

import glob
import io
import logging
import os
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from _data.work import Pairs, batch_of, collator

Batch = Any
AHEAD = 2
"""Batches that are made ahead of the one in use; the default of torch's DataLoader."""


def decode(pattern: str, batch: int) -> Iterator[Batch]:
    """The limit: encoded pictures lie in memory and are decoded, one after the other; nothing else."""
    encoded: list[bytes] = []
    for path in sorted(glob.glob(pattern)):
        with tarfile.open(path) as tar:
            for member in tar:
                if not member.name.endswith(".txt"):
                    file = tar.extractfile(member)
                    assert file is not None
                    encoded.append(file.read())
    while True:
        for start in range(0, len(encoded) - batch + 1, batch):
            for data in encoded[start : start + batch]:
                with Image.open(io.BytesIO(data)) as image:
                    image.convert("RGB")
            yield None


def planaria(pattern: str, batch: int) -> Iterator[Batch]:
    """A loader actor, and a rank's feed in this process."""
    import ray
    import torch

    from planaria.config import parse
    from planaria.data.batches import Batches
    from planaria.engine.batches import to_device
    from planaria.layout import Layout
    from planaria.runtime.beacon_server import BeaconServer
    from planaria.runtime.feed import LoaderFeed
    from planaria.runtime.fleet import actor_class
    from planaria.runtime.loader import Loader

    job = parse(
        {
            "name": "loading",
            "storage": "unused",
            "model": {"preset": "llava-tiny"},
            "data": {"source": "webdataset", "path": pattern, "prefetch": AHEAD},
            "train": {"steps": 10**9, "global_batch": batch, "micro_batch": batch},
        }
    )
    recipe = Pairs(pattern)
    with (
        _ray(),
        closing(BeaconServer("127.0.0.1", "bench", lambda *_: None, lambda _: None)) as beacon,
    ):
        loader = actor_class(Loader, max_concurrency=4).remote("loader-0", beacon.address, recipe, job)
        ray.get(loader.ready.remote())
        feed = LoaderFeed(job, Layout(), 0, [loader], Batches(recipe, job), lambda: False)
        step = 0
        while True:
            yield to_device(feed.get(step).micro_batches[0], torch.device("cpu"))
            step += 1


def webdataset(pattern: str, batch: int) -> Iterator[Batch]:
    """webdataset and torch's DataLoader with one worker."""
    import webdataset as wds
    from torch.utils.data import DataLoader

    shards = sorted(glob.glob(pattern))
    stages = wds.WebDataset(shards, shardshuffle=len(shards), seed=0).repeat().shuffle(1000)
    pairs = stages.decode("rgb8").to_tuple("jpg;png;webp", "txt").batched(batch, collation_fn=_Lists())
    yield from DataLoader(pairs, batch_size=None, num_workers=1, prefetch_factor=AHEAD)


def datasets(pattern: str, batch: int) -> Iterator[Batch]:
    """Hugging Face datasets, streaming, and torch's DataLoader with one worker."""
    from datasets import load_dataset
    from torch.utils.data import DataLoader

    stream = load_dataset("webdataset", data_files={"train": sorted(glob.glob(pattern))}, split="train", streaming=True)
    stream = stream.shuffle(seed=0, buffer_size=1000).repeat(None)
    yield from DataLoader(
        stream, batch_size=batch, num_workers=1, prefetch_factor=AHEAD, collate_fn=_Rows(), drop_last=True
    )


def ray_data(pattern: str, batch: int) -> Iterator[Batch]:
    """Ray Data: read, decode and collate in tasks on one CPU."""
    import ray

    with _ray():
        ray.data.DataContext.get_current().enable_progress_bars = False
        shards = sorted(glob.glob(pattern))
        while True:
            rows = ray.data.read_webdataset(shards, decoder=None, shuffle="files")
            made = rows.map_batches(_Encoded(), batch_size=batch, concurrency=1, num_cpus=1)
            yield from made.iter_batches(batch_size=None, prefetch_batches=AHEAD)


@contextmanager
def _ray() -> Iterator[None]:
    """One Ray node, so that whoever reads sits where the batches are made, as a rank with loaders on its node does."""
    import ray

    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with tempfile.TemporaryDirectory(prefix="planaria-", ignore_cleanup_errors=True) as folder:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=2**30,
            log_to_driver=False,
            logging_level=logging.WARNING,
            _temp_dir=folder,
        )
        try:
            yield
        finally:
            ray.shutdown()


class _Lists:
    """Collation of webdataset's columns, or of lists of (picture, caption)."""

    def __init__(self) -> None:
        self._collate = collator()

    def __call__(self, rows: Any) -> Batch:
        import torch

        pictures, captions = zip(*rows, strict=True)
        arrays = batch_of([np.asarray(picture) for picture in pictures], list(captions), self._collate)
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


class _Rows(_Lists):
    """Collation of rows as ``datasets`` yields them."""

    def __call__(self, rows: Any) -> Batch:
        pictures = [next(row[name] for name in ("jpg", "png", "webp") if row.get(name) is not None) for row in rows]
        return super().__call__([(p.convert("RGB"), row["txt"]) for p, row in zip(pictures, rows, strict=True)])


class _Encoded:
    """Decoding and collation of Ray Data's columns of bytes."""

    def __init__(self) -> None:
        self._collate = collator()

    def __call__(self, columns: dict[str, Any]) -> dict[str, Any]:
        name = next(name for name in ("jpg", "png", "webp") if name in columns)
        pictures = [np.asarray(Image.open(io.BytesIO(data)).convert("RGB")) for data in columns[name]]
        texts = [text if isinstance(text, str) else bytes(text).decode() for text in columns["txt"]]
        return batch_of(pictures, texts, self._collate)


CONTENDERS = {
    "decode limit": decode,
    "planaria": planaria,
    "webdataset + DataLoader": webdataset,
    "datasets streaming": datasets,
    "Ray Data": ray_data,
}


def folder_pattern(folder: Path) -> str:
    """The shards of a folder."""
    return str(folder / "*.tar")
