"""Shards to read: WebDataset tars of JPEGs as photographs compress, with captions."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

PER_SHARD = 200


def write_shards(folder: Path, count: int, side: int, seed: int = 0) -> list[Path]:
    """``count`` JPEGs of ``side`` pixels (quality 90, 4:2:0) with captions, :data:`PER_SHARD` to a tar.

    The pictures are smooth noise at several scales: white noise would make the decoder's entropy stage look slower,
    and flat colours faster, than on photographs (about 1.5 bits per pixel).
    """
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    pictures = [_jpeg(random, side) for _ in range(min(count, 64))]
    paths: list[Path] = []
    for start in range(0, count, PER_SHARD):
        path = folder / f"train-{start // PER_SHARD:05d}.tar"
        with tarfile.open(path, "w") as tar:
            for index in range(start, min(start + PER_SHARD, count)):
                _add(tar, f"{index:07d}.jpg", pictures[index % len(pictures)])
                _add(tar, f"{index:07d}.txt", f"picture {index} of several scales of noise, in colour".encode())
        paths.append(path)
    return paths


def _jpeg(random: np.random.Generator, side: int) -> bytes:
    field = np.zeros((side, side, 3), np.float32)
    for cells, weight in ((4, 60), (16, 35), (64, 16), (side, 4)):
        rough = random.normal(size=(cells, cells, 3)).astype(np.float32)
        channels = [
            np.asarray(Image.fromarray(rough[..., c]).resize((side, side), Image.Resampling.BICUBIC)) for c in range(3)
        ]
        field += weight * np.stack(channels, -1)
    buffer = io.BytesIO()
    Image.fromarray(np.clip(field + 128, 0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))
