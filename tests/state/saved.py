"""A small state, saved by two ranks, and places to harm it in: a folder or an object store, seen alike."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Protocol

import torch
from tests.support.object_stores import BUCKET, Store

from planaria.state.boxes import Box, shard_rows
from planaria.state.vault import Vault
from planaria.state.writer import Piece

SHAPE = (6, 4)
TENSORS = ("model/a", "model/b", "optim/exp_avg/a")
DATA_BYTES = 3 * 3 * 4 * 4
"""Bytes of tensors in one shard."""


def state(step: int) -> dict[str, torch.Tensor]:
    return {name: torch.full(SHAPE, float(step * 10 + i)) for i, name in enumerate(TENSORS)}


def write(vault: Vault, step: int, token: str = "t", value: int | None = None) -> list[Any]:
    """The shards of an attempt; what its commit needs."""
    tensors = state(step if value is None else value)
    slices = []
    for rank in range(2):
        box = shard_rows(SHAPE, rank, 2)
        pieces = [Piece(n, SHAPE, box, t[box.relative_to(Box.whole(SHAPE))]) for n, t in tensors.items()]
        slices += vault.writer(step, token).write_shard(rank, pieces)
    return slices


def save(vault: Vault, step: int, token: str = "t", value: int | None = None) -> str:
    return vault.writer(step, token).commit(write(vault, step, token, value), {"step": step})


class Place(Protocol):
    """Where checkpoints lie, seen from behind."""

    root: str

    def shard(self, folder: str, rank: int) -> str: ...
    def read(self, path: str) -> bytes: ...
    def replace(self, path: str, data: bytes) -> None: ...
    def remove(self, path: str) -> None: ...
    def names(self) -> list[str]:
        """Everything below ``checkpoints``, claims left out, shards by their rank alone."""
        ...


class Folder:
    def __init__(self, root: Path) -> None:
        self.root = str(root)

    def shard(self, folder: str, rank: int) -> str:
        return f"{folder}/shard-{rank:05d}.safetensors"

    def read(self, path: str) -> bytes:
        return Path(path).read_bytes()

    def replace(self, path: str, data: bytes) -> None:
        with open(path, "r+b") as out:  # the same file, also for those who have it open
            out.truncate(len(data))
            out.write(data)

    def remove(self, path: str) -> None:
        shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)

    def names(self) -> list[str]:
        return sorted(name for name in os.listdir(f"{self.root}/checkpoints") if name != "claims")


class Bucket:
    def __init__(self, store: Store, root: str) -> None:
        self.root, self.store = root, store

    def shard(self, folder: str, rank: int) -> str:
        (key,) = self.store.keys(f"{self._key(folder)}/shard-{rank:05d}-")
        return f"s3://{BUCKET}/{key}"

    def read(self, path: str) -> bytes:
        return self.store.client.get_object(Bucket=BUCKET, Key=self._key(path))["Body"].read()

    def replace(self, path: str, data: bytes) -> None:
        self.store.client.put_object(Bucket=BUCKET, Key=self._key(path), Body=data)

    def remove(self, path: str) -> None:
        self.store.client.delete_object(Bucket=BUCKET, Key=self._key(path))

    def names(self) -> list[str]:
        """Steps with a manifest, as locally; then whatever else there is."""
        keys = [key.partition("/checkpoints/")[2] for key in self.store.keys(self._key(self.root) + "/")]
        visible = sorted(key.removesuffix("/manifest.json") for key in keys if key.endswith("/manifest.json"))
        rest = [k for k in keys if not k.startswith("claims/") and k.partition("/")[0] not in visible]
        counts = {step: sum(1 for k in keys if k.startswith(f"{step}/shard-")) for step in visible}
        surplus = [f"{step}: {count} shards" for step, count in counts.items() if count != 2]
        return visible + rest + surplus + self.store.uploads(self._key(self.root) + "/")

    @staticmethod
    def _key(path: str) -> str:
        return path.removeprefix(f"s3://{BUCKET}/")
