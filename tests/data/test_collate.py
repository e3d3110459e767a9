from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.data.collate import IGNORE, VLMCollator
from planaria.data.images import fit, preprocess
from planaria.data.sample import Sample
from planaria.data.tokens import TextCodec, load_tokenizer
from planaria.engine.batches import to_device
from planaria.recipe import MicroBatch

CODEC = load_tokenizer("bytes")
MEAN, STD = (0.5, 0.4, 0.3), (0.5, 0.25, 0.2)
RED = np.full((16, 16, 3), (255, 0, 0), dtype=np.uint8)


def collator(image_tokens: int = 4, max_length: int = 64, pad_multiple: int = 8) -> VLMCollator:
    return VLMCollator(CODEC, image_tokens, 16, MEAN, STD, max_length, pad_multiple)


def sample(prompt: str = "Q?", answer: str = "red", image: np.ndarray | None = RED) -> Sample:
    return Sample("k", image, prompt, answer)


def spelled(batch: MicroBatch, row: int) -> list[int]:
    """The ids of a row under its mask."""
    return batch.arrays["input_ids"][row][batch.arrays["attention_mask"][row] == 1].tolist()


def targets(batch: MicroBatch, row: int) -> list[int]:
    labels = batch.arrays["labels"][row]
    return labels[labels != IGNORE].tolist()


def test_layout_of_a_row() -> None:
    batch = collator()([sample()], [1])
    answer = [*CODEC.encode("red"), CODEC.eos_id]
    expected = [CODEC.image_id] * 4 + CODEC.encode("\nQ?\n") + answer
    assert spelled(batch, 0) == expected and targets(batch, 0) == answer
    ids, mask, labels = (batch.arrays[name] for name in ("input_ids", "attention_mask", "labels"))
    assert ids.shape == mask.shape == labels.shape == (1, 16)
    assert {array.dtype for array in (ids, mask, labels)} == {np.dtype(np.int64)}
    assert (ids[0, 12:] == CODEC.pad_id).all() and (mask[0, 12:] == 0).all() and (labels[0, 12:] == IGNORE).all()
    assert (ids[labels != IGNORE] == labels[labels != IGNORE]).all()  # not shifted
    pixels = batch.arrays["pixel_values"]
    assert pixels.dtype == np.uint8 and (pixels[0] == fit(RED, 16)).all()
    scaled = to_device(batch, torch.device("cpu"))["pixel_values"]  # to the bit what the reference makes
    assert scaled.dtype == torch.float32 and (scaled[0].numpy() == preprocess(RED, 16, MEAN, STD)).all()
    assert batch.targets == 4 and batch.tokens == 12 and batch.ids == []


def test_mixed_rows_keep_pictures_in_row_order() -> None:
    blue = np.full((16, 16, 3), (0, 0, 255), dtype=np.uint8)
    batch = collator()([sample(), sample(image=None, answer="x"), sample(image=blue)], [1, 1, 0])
    assert batch.arrays["input_ids"].shape[0] == 3 and batch.arrays["pixel_values"].shape == (2, 3, 16, 16)
    assert (batch.arrays["pixel_values"][1] == fit(blue, 16)).all()
    assert [(batch.arrays["input_ids"][row] == CODEC.image_id).sum() for row in range(3)] == [4, 0, 4]
    assert targets(batch, 2) == [] and batch.targets == 4 + 2
    assert batch.tokens == 12 + 6  # the row of weight 0 counts for nothing


def test_text_only_batches_get_a_blank_picture_that_does_not_count() -> None:
    batch = collator()([sample(image=None), sample(image=None, prompt="Longer?")], [1, 1])
    ids = batch.arrays["input_ids"]
    assert ids.shape[0] == 3 and (ids[2] == CODEC.image_id).sum() == 4 and batch.arrays["attention_mask"][2].sum() >= 4
    assert batch.arrays["pixel_values"].shape == (1, 3, 16, 16)
    assert targets(batch, 2) == [] and batch.targets == 8 and batch.tokens == 8 + 13
    no_weight = collator()([sample(image=None)], [0])
    assert no_weight.targets == 0 and no_weight.tokens == 0 and (no_weight.arrays["labels"] == IGNORE).all()


def test_text_that_spells_the_placeholder_adds_none() -> None:
    batch = collator()([sample(prompt="<extra_id_0>", answer="<extra_id_0>")], [1])
    assert (batch.arrays["input_ids"] == CODEC.image_id).sum() == 4


def test_a_long_answer_loses_its_end_and_a_long_prompt_its_beginning() -> None:
    collate = collator(image_tokens=4, max_length=20)  # 16 after rounding, 12 of them for text
    long_prompt = spelled(collate([sample(prompt="x" * 50 + "end", answer="ab")], [1]), 0)
    assert long_prompt[4:] == [*CODEC.encode("xxxxxend\n"), *CODEC.encode("ab"), CODEC.eos_id]
    long_answer = collate([sample(prompt="Q", answer="abcdefghijklmnop")], [1])
    assert spelled(long_answer, 0)[4:] == CODEC.encode("\nQ\n") + CODEC.encode("abcdefghi")
    assert targets(long_answer, 0) == CODEC.encode("abcdefghi")
    both = collate([sample(prompt="x" * 50, answer="y" * 50)], [1])
    assert spelled(both, 0)[4:] == CODEC.encode("xxxxx\nyyyyyy")


texts = st.text(max_size=40)
drawn = st.lists(st.tuples(texts, texts, st.booleans(), st.integers(0, 1)), min_size=1, max_size=5)


@settings(max_examples=150, deadline=None)
@given(rows=drawn, image_tokens=st.integers(1, 20), spare=st.integers(2, 60), pad_multiple=st.sampled_from([1, 4, 8]))
def test_whatever_the_text(
    rows: list[tuple[str, str, bool, int]], image_tokens: int, spare: int, pad_multiple: int
) -> None:
    max_length = image_tokens + spare + pad_multiple - 1
    collate = collator(image_tokens, max_length, pad_multiple)
    samples = [sample(prompt, answer, RED if has_image else None) for prompt, answer, has_image, _ in rows]
    weights = [weight for *_, weight in rows]
    batch = collate(samples, weights)
    ids, mask, labels = (batch.arrays[name] for name in ("input_ids", "attention_mask", "labels"))
    has_image = [one.image is not None for one in samples]
    if not any(has_image):
        has_image.append(True)
        weights.append(0)
    assert ids.shape == mask.shape == labels.shape and ids.shape[0] == len(has_image)
    assert ids.shape[1] % pad_multiple == 0 and ids.shape[1] <= max_length
    assert batch.arrays["pixel_values"].shape[0] == sum(has_image)
    assert (ids == CODEC.image_id).sum(axis=1).tolist() == [image_tokens * one for one in has_image]
    counted = (labels[:, 1:] != IGNORE).sum(axis=1)
    assert all((count >= 1) == (weight == 1) for count, weight in zip(counted, weights, strict=True))
    assert batch.targets == counted.sum()
    assert batch.tokens == mask[np.array(weights) == 1].sum()
    assert ((labels == IGNORE) | ((labels == ids) & (mask == 1))).all()
    assert (np.diff(mask, axis=1) <= 0).all()  # padding on the right only


def test_one_target_remains_even_if_the_tokenizer_drops_the_prompt() -> None:
    class Silent:
        def encode(self, text: str, **_: object) -> list[int]:
            return []

    codec = TextCodec(Silent(), eos_id=1, pad_id=0, image_id=9, vocab_size=10)
    batch = VLMCollator(codec, 2, 16, MEAN, STD, 8)([sample(image=None)], [1])
    assert batch.targets == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 5), r"max_length=5 .*at least 8"),
        ((15, 23), r"rounded down to 16.*at least 24"),
        ((0, 64), "image_tokens=0"),
        ((4, 64, 0), "pad_multiple=0"),
    ],
)
def test_what_cannot_work_is_refused_at_construction(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collator(*arguments)


def test_wrong_statistics_and_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="std positive"):
        VLMCollator(CODEC, 4, 16, MEAN, (1.0, 0.0, 1.0), 64)
    with pytest.raises(ValueError, match="1 samples with 2 weights"):
        collator()([sample()], [1, 1])
    with pytest.raises(ValueError, match="0 samples"):
        collator()([], [])
