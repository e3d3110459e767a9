"""Pictures and shards, sound and damaged, made on the fly."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image


def corners(width: int = 24, height: int = 16) -> Image.Image:
    """Four plain quarters: red, green / blue, yellow. Every rotation and reflection looks different."""
    pixels = np.zeros((height, width, 3), dtype=np.uint8)
    pixels[: height // 2, : width // 2] = (255, 0, 0)
    pixels[: height // 2, width // 2 :] = (0, 255, 0)
    pixels[height // 2 :, : width // 2] = (0, 0, 255)
    pixels[height // 2 :, width // 2 :] = (255, 255, 0)
    return Image.fromarray(pixels)


def noise(side: int = 64) -> Image.Image:
    """A picture that no codec can shrink to almost nothing."""
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8))


def encode(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def write_shard(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def pairs(count: int, prefix: str = "s") -> list[tuple[str, bytes]]:
    """``count`` sound samples; the caption of sample i is "caption i" and its picture has the grey level i."""
    return [
        member
        for i in range(count)
        for member in (
            (f"{prefix}{i:04d}.png", encode(Image.new("RGB", (8, 8), (i % 256,) * 3))),
            (f"{prefix}{i:04d}.txt", f"caption {i}".encode()),
        )
    ]
