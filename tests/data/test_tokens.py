from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from planaria.data.errors import DataError
from planaria.data.tokens import load_tokenizer


def save_tokenizer(folder: Path, **special: object) -> Path:
    """A byte-level BPE tokenizer without merges, as a Hugging Face directory."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=core, **special).save_pretrained(folder)
    return folder


def test_bytes() -> None:
    codec = load_tokenizer("bytes")
    assert (codec.pad_id, codec.eos_id, codec.image_id, codec.vocab_size) == (0, 1, 259, 384)
    text = "\nWhat colour?  é 漢\n"
    assert len(codec.encode(text)) == len(text.encode()) and codec.decode(codec.encode(text)) == text
    assert codec.decode([codec.image_id, *codec.encode("red"), codec.eos_id, codec.pad_id]) == "red"


@pytest.mark.parametrize("literal", ["<extra_id_0>", "a</s>b", "<pad>", "<extra_<extra_id_0>id_0>"])
def test_names_of_special_tokens_in_text_stay_text(literal: str) -> None:
    codec = load_tokenizer("bytes")
    ids = codec.encode(literal)
    assert codec.decode(ids) == literal and not {codec.image_id, codec.eos_id, codec.pad_id} & set(ids)


def test_directory_with_and_without_an_image_token(tmp_path: Path) -> None:
    without = load_tokenizer(str(save_tokenizer(tmp_path / "a", eos_token="</s>", pad_token="<pad>")))
    assert without.image_id == without.vocab_size - 1 == 258  # the new token comes after 256 bytes, eos and pad
    named = save_tokenizer(tmp_path / "b", eos_token="</s>", additional_special_tokens=["<image>", "<x>"])
    codec = load_tokenizer(str(named))
    assert codec.vocab_size == 259 and codec.decode([codec.image_id]) == ""
    assert codec.tokenizer.convert_ids_to_tokens(codec.image_id) == "<image>"
    assert codec.pad_id == codec.eos_id  # no padding token of its own
    for each in (without, codec):
        assert each.decode([each.image_id, each.pad_id]) == ""
        ids = each.encode("an <image> of </s> é\n")
        assert each.image_id not in ids and each.eos_id not in ids and each.decode(ids) == "an <image> of </s> é\n"
        copy = pickle.loads(pickle.dumps(each))
        assert copy.encode("hi <image>") == each.encode("hi <image>") and copy.image_id == each.image_id


def test_an_ordinary_added_token_can_be_the_placeholder(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(save_tokenizer(tmp_path / "a", eos_token="</s>"))
    tokenizer.add_tokens(["<image>"])
    tokenizer.save_pretrained(tmp_path / "b")
    codec = load_tokenizer(str(tmp_path / "b"))
    assert codec.image_id == codec.tokenizer.convert_tokens_to_ids("<image>") == codec.vocab_size - 1
    assert codec.decode(codec.encode("an <image>")) == "an "  # cannot be spelled out, so it is left out


def test_existing_special_tokens_survive_the_new_one(tmp_path: Path) -> None:
    codec = load_tokenizer(str(save_tokenizer(tmp_path / "a", eos_token="</s>", additional_special_tokens=["<x>"])))
    assert codec.decode([codec.tokenizer.convert_tokens_to_ids("<x>"), *codec.encode("y")]) == "y"


def test_what_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer .*nowhere: no such directory; set data\.tokenizer"):
        load_tokenizer(str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="no loadable tokenizer"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(DataError, match=r"no loadable tokenizer|no vocabulary"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="no loadable tokenizer"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(DataError, match="no end-of-sequence token"):
        load_tokenizer(str(save_tokenizer(tmp_path / "b")))


def test_the_package_imports_neither_ray_nor_torch_nor_transformers() -> None:
    code = (
        "import sys, planaria.data.source, planaria.data.builder, planaria.data.collate, planaria.data.tokens\n"
        "print(sorted({'ray', 'torch', 'transformers'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
