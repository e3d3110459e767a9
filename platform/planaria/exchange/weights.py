"""Safetensors files of a Hugging Face directory, written one tensor at a time."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from planaria.models.pretrained import INDEX, SINGLE
from planaria.state.dtypes import code_of
from planaria.state.shard import bytes_of


@dataclass(frozen=True)
class Planned:
    """Which tensors go to which file.

    Attributes:
        files: names of the tensors in every file, by its name, in order.
        total: bytes of all tensors.
    """

    files: Mapping[str, Sequence[str]]
    total: int


def plan_files(shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, max_bytes: int) -> Planned:
    """Fill files up to ``max_bytes``, in order; a larger tensor has a file of its own."""
    sizes = {name: torch.Size(shape).numel() * dtype.itemsize for name, shape in shapes.items()}
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    stem, suffix = SINGLE.split(".")
    names = [f"{stem}-{at:05d}-of-{len(groups):05d}.{suffix}" for at in range(1, len(groups) + 1)]
    files = dict(zip(names if len(groups) > 1 else [SINGLE], groups, strict=True))
    return Planned(files, sum(sizes.values()))


def write_files(
    folder: Path,
    planned: Planned,
    shapes: Mapping[str, Sequence[int]],
    dtype: torch.dtype,
    read: Callable[[str], torch.Tensor],
) -> None:
    """Write all files, and their index if there are several.

    Args:
        read: gives one tensor of ``dtype`` by its name; called once for each, in order.
    """
    for file, names in planned.files.items():
        with (folder / file).open("wb") as out:
            out.write(_header({name: shapes[name] for name in names}, dtype))
            for name in names:
                out.write(bytes_of(read(name).contiguous()))
    if len(planned.files) > 1:
        where = {name: file for file, names in planned.files.items() for name in names}
        tree = {"metadata": {"total_size": planned.total}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX).write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


def _header(shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> bytes:
    # Readers of Hugging Face want to be told which framework wrote the file.
    tree: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        tree[name] = {"dtype": code_of(dtype), "shape": list(shape), "data_offsets": [start, start + size]}
        start += size
    raw = json.dumps(tree, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw
