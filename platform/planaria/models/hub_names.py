"""Names of tensors in a Hugging Face file, and names of the parameters in the module that they fill.

They differ (LLaVA has none in common), and the mapping is transformers' own in both directions: what its
``from_pretrained`` does to a name of a file, and what its ``save_pretrained`` does to that of a parameter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.modeling_utils import remove_tied_weights_from_state_dict


class MustBeConverted(ValueError):
    """Tensors that differ from the module's parameters by more than their names.

    Attributes:
        names: the tensors, as their source names them.
    """

    def __init__(self, names: list[str]) -> None:
        super().__init__(", ".join(names))
        self.names = names


class HubNames:
    """Both directions for one model, which may be on the meta device."""

    def __init__(self, model: PreTrainedModel | nn.Module) -> None:
        assert isinstance(model, PreTrainedModel)
        self._model = model
        self._known = model.state_dict()
        self._buffers = {name for name, _ in model.named_buffers()}
        mapping = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self.first: dict[str, str] = {}
        """For every name of a parameter the first name of the same tensor: tied ones have several."""
        self.scalars: frozenset[str] = getattr(model, "scalar_parameters", frozenset())
        """Parameters of shape (1,) that files hold without a dimension."""
        seen: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.first[name] = seen.setdefault(id(parameter), name)

    def to_module(self, key: str) -> str | None:
        """Name in the module of the file's tensor ``key``; None if the module has no place for it.

        Raises:
            MustBeConverted: renaming does not make it the module's parameter.
        """
        name, converter = rename_source_key(
            key, self._renamings, self._converters, self._model.base_model_prefix, self._known
        )
        if name not in self._known and key in self._known:
            return key
        if converter is not None:
            raise MustBeConverted([key])
        return name if name in self._known else None

    def meaningless(self, key: str) -> bool:
        """Whether a tensor of a file without a place in the module may be passed over: a buffer that older versions
        saved, or what the model itself says to ignore."""
        name, _ = rename_source_key(key, self._renamings, self._converters, self._model.base_model_prefix, self._known)
        return name in self._buffers or _ignored(self._model, name)

    def to_hub(self) -> dict[str, str]:
        """Name in a file that ``save_pretrained`` would write, by the (first) name of every parameter.

        Raises:
            MustBeConverted: some differ by more than their names.
        """
        saved = remove_tied_weights_from_state_dict(dict(self._known), self._model)
        saved = {name: tensor for name, tensor in saved.items() if name in self.first}
        origin = {id(tensor): self.first[name] for name, tensor in saved.items()}
        written: Mapping[str, torch.Tensor] = revert_weight_conversion(self._model, saved)
        names = {origin[id(tensor)]: key for key, tensor in written.items() if id(tensor) in origin}
        if lost := [name for name in origin.values() if name not in names]:
            raise MustBeConverted(lost)
        return names


def _ignored(model: PreTrainedModel, name: str) -> bool:
    """Whether a part of the model says that a tensor of this name in a file means nothing."""
    for prefix, part in model.named_modules():
        if isinstance(part, PreTrainedModel) and name.startswith(f"{prefix}." if prefix else ""):
            patterns = part._keys_to_ignore_on_load_unexpected or ()
            if any(re.search(pattern, name) for pattern in patterns):
                return True
    return False
