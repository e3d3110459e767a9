"""What belongs to the weights in a Hugging Face directory: config, generation config, tokenizer, processor."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, GenerationMixin

from planaria.config import JobConfig
from planaria.data.tokens import TextCodec

TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)
TEMPLATES = ("chat_template.jinja", "chat_template.json")
PROCESSOR = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
GENERATION = "generation_config.json"


def write_companions(folder: Path, job: JobConfig, model: nn.Module, codec: TextCodec, dtype: torch.dtype) -> None:
    """Write everything but the weights.

    The tokenizer is the one that the job trains with. What else the job's ``model.path`` has is copied as it is;
    nothing is made up for a processor, so where the model came without one, the directory has none either.
    """
    config: Any = model.config
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        part.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    assert job.model is not None
    if job.model.path is not None:
        _copy(Path(job.model.path), folder, (*PROCESSOR, *TEMPLATES, GENERATION))
    if isinstance(model, GenerationMixin) and not (folder / GENERATION).exists():
        # Not what transformers takes for granted of a decoder (Llama's ids), but what this one was trained with.
        GenerationConfig(eos_token_id=codec.eos_id, pad_token_id=codec.pad_id).save_pretrained(folder)
    _write_tokenizer(folder, job.data.tokenizer, codec)


def _write_tokenizer(folder: Path, name: str, codec: TextCodec) -> None:
    if name != "bytes":
        from transformers import AutoTokenizer

        _copy(Path(name), folder, (*TOKENIZER, *TEMPLATES))
        if len(AutoTokenizer.from_pretrained(name, local_files_only=True)) == codec.vocab_size:
            return  # as it was; otherwise the image token was added to it, and belongs in the copy, too
    codec.tokenizer.save_pretrained(folder)


def _copy(origin: Path, folder: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if (origin / name).is_file():
            shutil.copyfile(origin / name, folder / name)
