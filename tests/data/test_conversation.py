from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.data.pictures import encode, write_shard
from tests.data.sets import write_records

from planaria.config import DataConfig, load
from planaria.data.batches import Batches
from planaria.data.collate import IGNORE, VLMCollator
from planaria.data.conversation import question_turn, read_turns
from planaria.data.formats import open_files
from planaria.data.sample import Sample, Turn, conversation_sample
from planaria.data.tokens import load_tokenizer
from planaria.models.vlm import VLMRecipe
from planaria.recipe import BadSample, MicroBatch

CODEC = load_tokenizer("bytes")
LLAVA = [
    {"from": "human", "value": "<image>\nWhat is it?"},
    {"from": "gpt", "value": "A hat."},
    {"from": "human", "value": "Like <image> or <image>?"},
    {"from": "gpt", "value": " The first. "},
]
TURNS = (Turn(("", "\nWhat is it?"), "A hat."), Turn(("\nLike ", " or ", "?"), "The first."))


def chat(turns: list[dict[str, str]]) -> list[dict[str, Any]]:
    """The same as messages with parts."""
    messages: list[dict[str, Any]] = []
    for turn in turns:
        parts: list[dict[str, Any]] = []
        for number, text in enumerate(turn["value"].split("<image>")):
            parts += [{"type": "image"}] if number else []
            parts += [{"type": "text", "text": text}] if text else []
        messages.append({"role": "user" if turn["from"] == "human" else "assistant", "content": parts})
    return messages


def test_every_spelling_gives_the_same_turns() -> None:
    cauldron = [
        {"user": LLAVA[0]["value"], "assistant": LLAVA[1]["value"], "source": "x"},
        {"user": LLAVA[2]["value"], "assistant": LLAVA[3]["value"]},
    ]
    for spelling in (LLAVA, chat(LLAVA), cauldron, json.dumps(LLAVA), json.dumps(LLAVA).encode()):
        assert read_turns(spelling, 3, "k") == TURNS


def test_system_text_and_unmarked_pictures_come_first() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *({"role": "user", "content": text} for text in ("A", "B"))]
    messages.append({"role": "assistant", "content": "C"})
    assert read_turns(messages, 2, "k") == (Turn(("", "", "\nBe brief.\nA\nB"), "C"),)
    assert question_turn("Say <image>.", "x", 1, "k", marked=False) == (Turn(("", "\nSay <image>."), "x"),)


@pytest.mark.parametrize(
    ("value", "pictures", "cause"),
    [
        (None, 0, "no list of turns"),
        ([], 0, "no list of turns"),
        ("{", 0, "not valid JSON"),
        (["hi"], 0, "message 1 of the conversation is no mapping but str"),
        ([{"from": "bot", "value": "x"}], 0, "is from 'bot'; known: human, user"),
        (LLAVA[:1], 1, "ends without an answer"),
        (LLAVA[1:2], 0, "answer without a question"),
        ([LLAVA[0], {"from": "gpt", "value": " "}], 1, "answer 1 is empty"),
        ([LLAVA[0], {"from": "gpt"}], 1, "message 2 of the conversation has no text but NoneType"),
        (LLAVA, 2, "the text has 3 <image> marks, but there are 2 pictures"),
        (LLAVA, 0, "3 <image> marks, but there are 0 pictures"),
        ([LLAVA[0], {"from": "gpt", "value": "see <image>"}], 2, "an answer with a place for a picture"),
        ([{"role": "user", "content": [{"type": "video"}]}], 0, "unknown type 'video'"),
        ([{"from": "human", "value": "\ud83d"}, LLAVA[1]], 0, "lone surrogate"),
    ],
)
def test_what_is_no_conversation(value: Any, pictures: int, cause: str) -> None:
    with pytest.raises(BadSample, match=cause):
        read_turns(value, pictures, "k")


def picture(level: int) -> np.ndarray:
    return np.full((8, 8, 3), level, dtype=np.uint8)


def collated(sample: Sample, max_length: int = 160) -> MicroBatch:
    return VLMCollator(CODEC, 4, 8, (0, 0, 0), (1, 1, 1), max_length)([sample], [1])


def test_loss_stands_on_all_answers_and_on_nothing_else() -> None:
    batch = collated(conversation_sample("k", [picture(i) for i in (10, 20, 30)], TURNS))
    image, end = [CODEC.image_id] * 4, [CODEC.eos_id]
    expected = [
        (image + CODEC.encode("\nWhat is it?\n"), False),
        (CODEC.encode("A hat.") + end, True),
        (CODEC.encode("\nLike ") + image + CODEC.encode(" or ") + image + CODEC.encode("?\n"), False),
        (CODEC.encode("The first.") + end, True),
    ]
    length = sum(len(ids) for ids, _ in expected)
    assert batch.arrays["input_ids"][0, :length].tolist() == [token for ids, _ in expected for token in ids]
    labels = [token if learn else IGNORE for ids, learn in expected for token in ids]
    assert batch.arrays["labels"][0, :length].tolist() == labels
    assert batch.arrays["pixel_values"][:, 0, 0, 0].tolist() == [10, 20, 30]
    assert batch.targets == sum(label != IGNORE for label in labels)


def test_a_single_turn_equals_a_plain_pair() -> None:
    pair = Sample("k", picture(5), "What?", "That.")
    same = conversation_sample("k", [picture(5)], (Turn(("", "\nWhat?"), "That."),))
    for name, array in collated(pair).arrays.items():
        assert np.array_equal(array, collated(same).arrays[name])


def test_turns_that_do_not_fit_go_with_their_pictures() -> None:
    sample = conversation_sample("k", [picture(i) for i in (10, 20, 30)], TURNS)
    batch = collated(sample, 32)
    assert len(batch.arrays["pixel_values"]) == 1 and (batch.arrays["input_ids"] == CODEC.image_id).sum() == 4
    assert batch.targets == len("A hat.") + 1
    long_head = conversation_sample("k", [picture(1)] * 2, (Turn(("", "x" * 99, "?"), "yes"),))
    batch = collated(long_head, 24)
    assert (batch.arrays["input_ids"] == CODEC.image_id).sum() == 8 and batch.targets >= 1
    with pytest.raises(ValueError, match=r"sample k: 3 pictures of 4 placeholders .* raise data\.max_length"):
        collated(conversation_sample("k", [picture(1)] * 3, (Turn(("", "", "", "?"), "yes"),)), 13)


pieces = st.lists(st.text(max_size=12), min_size=1, max_size=4)


@settings(max_examples=100, deadline=None)
@given(turns=st.lists(st.tuples(pieces, st.text(max_size=12)), min_size=1, max_size=4), spare=st.integers(2, 60))
def test_whatever_the_conversation(turns: list[tuple[list[str], str]], spare: int) -> None:
    whole = tuple(Turn(tuple(prompt), answer) for prompt, answer in turns)
    images = [picture(at) for at in range(sum(turn.pictures for turn in whole))]
    max_length = 4 * whole[0].pictures + spare + 7
    batch = collated(conversation_sample("k", images, whole), max(max_length, 13))
    ids, labels, mask = (batch.arrays[name] for name in ("input_ids", "labels", "attention_mask"))
    shown = len(batch.arrays["pixel_values"])
    assert (ids == CODEC.image_id).sum() == 4 * shown and ids.shape[1] <= max(max_length, 13)
    assert batch.targets == (labels[:, 1:] != IGNORE).sum() >= 1
    assert ((labels == IGNORE) | ((labels == ids) & (mask == 1) & (ids != CODEC.image_id))).all()
    counts = [0]
    for turn in whole:
        counts.append(counts[-1] + turn.pictures)
    assert shown in (*counts, 1)


def test_llava_records(tmp_path: Path) -> None:
    for level in range(3):
        (tmp_path / f"{level}.png").write_bytes(encode(Image.new("RGB", (8, 8), (level,) * 3)))
    text = [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": "Hello."}]
    records = [
        {"id": "one", "image": "0.png", "conversations": LLAVA[:2]},
        {"id": "three", "image": ["0.png", "1.png", "2.png"], "conversations": LLAVA},
        {"id": "none", "conversations": text},
        {"id": "count", "image": ["0.png"], "conversations": LLAVA},
        {"id": "gone", "image": "9.png", "conversations": LLAVA[:2]},
        {"id": "spare", "image": None, "conversations": LLAVA[:2]},
    ]
    for name in ("a.json", "a.jsonl"):
        path = write_records(tmp_path / name, records)
        tree = {"source": "files", "path": str(path), "cache_dir": str(tmp_path / "cache")}
        dataset = open_files(str(path), DataConfig.model_validate(tree))
        found = [dataset[index] for index in range(3)]
        assert [len(sample.images) for sample in found] == [1, 3, 0] and found[1].conversation == TURNS
        assert [int(image[0, 0, 0]) for image in found[1].images] == [0, 1, 2]
        assert [sample.key for sample in found] == [f"{name}/one", f"{name}/three", f"{name}/none"]
        for index, cause in {
            3: "3 <image> marks, but there are 1 pictures",
            4: "9.png cannot be read",
            5: "0 pictures",
        }.items():
            with pytest.raises(BadSample, match=cause):
                dataset[index]


def test_conversations_in_tars(tmp_path: Path) -> None:
    png = encode(Image.new("RGB", (8, 8), "red"))
    members = [
        ("a.json", json.dumps({"conversations": LLAVA[:2]}).encode()),
        ("a.png", png),
        ("b.json", json.dumps([{"user": "Hi.", "assistant": "Hello."}]).encode()),
        ("c.json", json.dumps({"messages": chat(LLAVA)}).encode()),
        ("c.png", png),
        ("d.json", b'{"caption": "alone"}'),
    ]
    path = write_shard(tmp_path / "a.tar", members)
    dataset = open_files(str(path), DataConfig.model_validate({"source": "files", "path": str(path)}))
    assert dataset[0].conversation == TURNS[:1] and len(dataset[0].images) == 1
    assert dataset[1].image is None and dataset[1].answer == "Hello."
    for index, cause in {2: "3 <image> marks, but there are 1 pictures", 3: "no image member"}.items():
        with pytest.raises(BadSample, match=cause):
            dataset[index]


def test_the_shipped_job_builds_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pictures").mkdir()
    for level in range(3):
        (tmp_path / "pictures" / f"{level}.png").write_bytes(encode(Image.new("RGB", (8, 8), (level,) * 3)))
    three = {"image": ["0.png", "1.png", "2.png"], "conversations": LLAVA}
    text = {"conversations": [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": "Hello."}]}
    crowd = {"image": ["0.png"] * 16, "conversations": [{"from": "human", "value": "<image>" * 16}, LLAVA[1]]}
    write_records(tmp_path / "train.json", [three, text, {"image": "9.png", "conversations": LLAVA[:2]}, crowd])
    monkeypatch.setenv("PLANARIA_CONVERSATIONS", str(tmp_path))
    changes = ["train.global_batch=4", "data.shuffle=false", f"data.cache_dir={tmp_path}/cache"]
    job = load(Path(__file__).parents[2] / "jobs/configs/conversations.yaml", changes)
    built = Batches(VLMRecipe(job), job).build(0, 0, 4, 2)
    assert [record.position for record in built.bad if record.attempt == 0] == [2, 3]
    assert "9.png cannot be read" in built.bad[0].cause
    assert any("has 16 images, and data.max_length has room for 15" in record.cause for record in built.bad)
    assert set(built.micro_batches[1].ids) <= {0, 1}
    assert len(built.micro_batches[0].arrays["pixel_values"]) == 3
