"""Text to token ids and back, with the few special ids that training needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planaria.data.errors import DataError

IMAGE_TOKEN = "<image>"
"""The image placeholder of a tokenizer that names none itself."""


@dataclass(frozen=True)
class TextCodec:
    """A Hugging Face tokenizer, reduced to what the data plane uses. Can be pickled."""

    tokenizer: Any
    eos_id: int
    pad_id: int
    """Equals ``eos_id`` where the tokenizer has no padding token; masks tell them apart."""
    image_id: int
    """Id of the image placeholder."""
    vocab_size: int
    """Number of ids, added tokens included: the embedding needs at least as many rows."""

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, without special tokens: names of special tokens in the text are spelled out as text,
        and ``image_id`` never occurs, so that placeholders always match the pictures."""
        ids = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return [int(token) for token in ids if token != self.image_id]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out."""
        text = self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)


def load_tokenizer(name: str) -> TextCodec:
    """The byte tokenizer of ByT5 (``"bytes"``, needs no files), or the tokenizer in a local directory.

    The image placeholder is ``<extra_id_0>`` for bytes; for a directory the ``image_token`` that the tokenizer
    declares, else ``<image>``. A tokenizer without it gets it as a new token, whose id is then the former
    ``len(tokenizer)``: the model's embedding must be resized to ``vocab_size``.

    Raises:
        DataError: no such directory, no loadable tokenizer in it, or one without an end-of-sequence token.
    """
    if name == "bytes":
        from transformers import ByT5Tokenizer  # here, since the import takes a second

        return _codec(ByT5Tokenizer(), "<extra_id_0>", name)
    where = f"tokenizer {name}"
    remedy = 'set data.tokenizer to "bytes" or to a directory with tokenizer.json and tokenizer_config.json'
    if not Path(name).is_dir():
        raise DataError(where, "no such directory", remedy)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True)
    except Exception as error:  # anything may come out of a directory that holds something else
        first_line = str(error).strip().partition("\n")[0]
        raise DataError(where, f"no loadable tokenizer ({type(error).__name__}: {first_line})", remedy) from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # a mere config.json yields an empty tokenizer
        raise DataError(where, "the directory holds no vocabulary", remedy)
    return _codec(tokenizer, getattr(tokenizer, "image_token", None) or IMAGE_TOKEN, where)


def _codec(tokenizer: Any, image_token: str, where: str) -> TextCodec:
    if tokenizer.eos_token_id is None:
        raise DataError(where, "it has no end-of-sequence token", "add eos_token to its tokenizer_config.json")
    if image_token not in tokenizer.get_vocab():
        tokenizer.add_tokens([image_token], special_tokens=True)
    pad_id = tokenizer.pad_token_id
    return TextCodec(
        tokenizer=tokenizer,
        eos_id=tokenizer.eos_token_id,
        pad_id=tokenizer.eos_token_id if pad_id is None else pad_id,
        image_id=tokenizer.convert_tokens_to_ids(image_token),
        vocab_size=len(tokenizer),
    )
