"""Weights of a local Hugging Face directory, read by box under the names of the model's own parameters.

Names in a file differ from those of the module (LLaVA has none in common); transformers' own loader renames
them, and so does this. Only the asked-for part of a tensor is read, so a rank needs memory for its shards alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from planaria.config import ConfigError
from planaria.models.hub_names import HubNames, MustBeConverted
from planaria.state.boxes import Box

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHOWN = 5
"""Names that an error lists."""


class PretrainedState:
    """Implements :class:`planaria.recipe.StateReader` for a directory written by ``save_pretrained``.

    Args:
        path: directory with ``model.safetensors``, or its shards and their index; the same on every node.
        model: the model whose parameters are asked for, e.g. on the meta device.

    Raises:
        ConfigError: no safetensors, a damaged file, or tensors that are missing, not known or of another shape.
    """

    step = 0

    def __init__(self, path: str, model: PreTrainedModel | nn.Module) -> None:
        assert isinstance(model, PreTrainedModel)
        self._path = Path(path)
        self._files: dict[Path, Any] = {}
        names = HubNames(model)
        self._scalars = names.scalars
        found = dict(self._renamed(names))
        self._sources: dict[str, tuple[Path, str]] = {}
        aliases: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            aliases.setdefault(id(parameter), []).append(name)
        missing = []
        for name, parameter in model.named_parameters():
            # Of tensors that are tied the file holds one, under either name.
            source = next((found[alias] for alias in aliases[id(parameter)] if alias in found), None)
            if source is None:
                missing.append(name)
                continue
            shape = tuple(self._open(source[0]).get_slice(source[1]).get_shape())
            if shape != tuple(parameter.shape) and (shape or name not in self._scalars):
                raise ConfigError(
                    f"model.path: {source[1]} in {source[0]} has the shape {list(shape)}, but config.json makes it "
                    f"{list(parameter.shape)}; are both of the same model?"
                )
            self._sources[name] = source
        if missing:
            raise ConfigError(f"model.path: {path!r} lacks {_some(missing)}; is it complete, and of this architecture?")

    def read(self, tensor: str, box: Box) -> Tensor:
        """Part ``box`` of ``model/NAME``, in the dtype of the file; raises KeyError for anything else."""
        kind, _, name = tensor.partition("/")
        if kind != "model" or name not in self._sources:
            raise KeyError(f"{self._path} holds no {tensor}")
        file, key = self._sources[name]
        if name in self._scalars:
            whole: Tensor = self._open(file).get_tensor(key).reshape(1)
            return whole[box.relative_to(Box.whole((1,)))]
        part: Tensor = self._open(file).get_slice(key)[box.relative_to(Box.whole(box.stop))]
        return part

    def source(self, name: str) -> str:
        """Name in the file of the tensor that parameter ``name`` is read from."""
        return self._sources[name][1]

    def _renamed(self, names: HubNames) -> Iterator[tuple[str, tuple[Path, str]]]:
        """(name in the model, (file, name in the file)) of every tensor that the model wants."""
        unknown = []
        for file in self._shards():
            for key in self._open(file).keys():  # noqa: SIM118  not a mapping
                try:
                    name = names.to_module(key)
                except MustBeConverted:
                    raise ConfigError(
                        f"model.path: {key} in {file} must be converted, not only renamed; load the directory with "
                        "this version of transformers, save_pretrained() it, and give the result"
                    ) from None
                if name is not None:
                    yield name, (file, key)
                elif not names.meaningless(key):
                    unknown.append(key)
        if unknown:
            raise ConfigError(
                f"model.path: {str(self._path)!r} holds {_some(unknown)}, for which the model has no place; "
                "is config.json the one that belongs to these weights?"
            )

    def _shards(self) -> list[Path]:
        if (self._path / SINGLE).is_file():
            return [self._path / SINGLE]
        index = self._path / INDEX
        if not index.is_file():
            raise ConfigError(
                f"model.path: {str(self._path)!r} holds neither {SINGLE} nor {INDEX}; convert the weights with "
                "save_pretrained() of a recent transformers"
            )
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"model.path: {index} is damaged ({error!r}); fetch the directory again") from None
        return [self._path / name for name in names]

    def _open(self, file: Path) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(str(file), framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"model.path: {file} cannot be read ({error}); fetch the directory again") from None
        return self._files[file]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{len(names)} tensors ({', '.join(names[:SHOWN])}{more})"
