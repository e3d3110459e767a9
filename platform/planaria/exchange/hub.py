"""A Hugging Face directory as the source of an import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from planaria.exchange.errors import ExchangeError
from planaria.models.pretrained import INDEX, SINGLE


class HubSource:
    """Implements :class:`planaria.exchange.source.Source` for ``model.safetensors`` or its shards.

    Raises:
        ExchangeError: no such file, or one that is damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.label = str(folder)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._where: dict[str, tuple[Path, Any]] = {}
        for file in self._files():
            opened = self._open(file)
            for key in opened.keys():  # noqa: SIM118  not a mapping
                self._shapes[key] = tuple(opened.get_slice(key).get_shape())
                self._where[key] = file, opened

    @staticmethod
    def is_one(folder: Path) -> bool:
        """Whether ``folder`` holds weights in this form."""
        return (folder / SINGLE).is_file() or (folder / INDEX).is_file()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self._shapes)

    def read(self, key: str) -> torch.Tensor:
        file, opened = self._where[key]
        try:
            tensor: torch.Tensor = opened.get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise ExchangeError(f"{file}: {key}: cannot be read ({error}); fetch the directory again") from None
        return tensor

    def _files(self) -> list[Path]:
        if (self.folder / SINGLE).is_file():
            return [self.folder / SINGLE]
        index = self.folder / INDEX
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ExchangeError(f"{index}: damaged ({error!r}); fetch the directory again") from None
        return [self.folder / name for name in names]

    def _open(self, file: Path) -> Any:
        try:
            return safe_open(str(file), framework="pt", device="cpu")
        except (OSError, SafetensorError) as error:
            raise ExchangeError(f"{file}: cannot be read ({error}); fetch the directory again") from None
