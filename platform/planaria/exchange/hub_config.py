"""Whether a Hugging Face directory describes the same model as a job: weights of one shape can mean two models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from planaria.config import ConfigError
from planaria.exchange.contents import Contents
from planaria.exchange.errors import ExchangeError
from planaria.models.choose import directory_config

_MEANINGLESS = frozenset(
    [
        "_name_or_path",
        "architectures",
        "transformers_version",
        "dtype",
        "torch_dtype",
        "use_cache",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "decoder_start_token_id",
        "initializer_range",
        "initializer_factor",
        "attention_dropout",
        "dropout",
        "hidden_dropout",
        "embd_pdrop",
        "resid_pdrop",
        "image_seq_length",
        "id2label",
        "label2id",
        "problem_type",
        "max_position_embeddings",
        "chunk_size_feed_forward",
        "tie_word_embeddings",
        "projection_dim",
        "is_encoder_decoder",
        "pretraining_tp",
    ]
)
"""Keys that change neither the names nor the values of what the model computes in evaluation. Ties show in the
tensors; positions are computed, not stored, up to any length."""


def check_config(folder: Path, contents: Contents) -> None:
    """Compare ``folder/config.json``, if it is there, with the model of the job.

    Raises:
        ExchangeError: lists the keys that differ.
        ConfigError: the file is not readable, or of a model that is not supported.
    """
    if not (folder / "config.json").is_file():
        return
    try:
        theirs = directory_config(str(folder))
    except ConfigError as error:
        raise ExchangeError(str(error).replace("model.path: ", "", 1)) from None
    ours = contents.recipe.config
    different = [
        f"{key}: {json.dumps(there, default=str)} there, {json.dumps(here, default=str)} in the job"
        for key, there, here in _differences(theirs.to_dict(), ours.to_dict(), "")
    ]
    if different:
        raise ExchangeError(
            f"{folder / 'config.json'}: describes another model than the job"
            + "".join(f"\n  {line}" for line in different)
            + "\nset these keys in model.config (image_token_id follows data.tokenizer), or train with model.path: "
            + str(folder)
        )


def _differences(theirs: Any, ours: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for name in sorted(theirs.keys() | ours.keys()):
            if name not in _MEANINGLESS:
                yield from _differences(theirs.get(name), ours.get(name), f"{key}.{name}" if key else name)
    elif theirs != ours:
        yield key, theirs, ours
