from __future__ import annotations

import hashlib
import itertools
import pickle
import re
from collections import Counter

import numpy as np
import pytest

from planaria.config import ScenesConfig
from planaria.data.errors import DataError
from planaria.data.render import COLOURS, SHAPES, SIZES, Placed, Shape, render
from planaria.data.sample import Sample
from planaria.data.scenes import COLOUR_SHARE, PLURALS, Scenes, caption
from planaria.recipe import Dataset

TOLD = re.compile(r"There is (.+?)\. (.+)")
PHRASE = re.compile(r"(small|large) (\w+) (\w+)")


def scenes(split: str = "train", size: int = 32, seed: int = 0, **config: float) -> Scenes:
    return Scenes(ScenesConfig.model_validate(config), split, size, seed)


def told_items(sample: Sample) -> tuple[list[Shape], str]:
    """The scene and the question of a text-only sample: its prompt states the whole scene."""
    match = TOLD.fullmatch(sample.prompt)
    assert match, sample.prompt
    return [Shape(colour, shape, size) for size, colour, shape in PHRASE.findall(match[1])], match[2]


def solve(question: str, items: list[Shape]) -> set[str]:
    """All answers that are right, found without the code under test."""

    def fits(item: Shape, words: list[str]) -> bool:
        return all(word in (item.colour, item.shape, item.size, "one") for word in words)

    if match := re.fullmatch(r"What colour is the (.+)\?", question):
        return {item.colour for item in items if fits(item, match[1].split())}
    if match := re.fullmatch(r"What shape is the (.+)\?", question):
        return {item.shape for item in items if fits(item, match[1].split())}
    if match := re.fullmatch(r"How many (\w+) are there\?", question):
        shape = {plural: name for name, plural in PLURALS.items()}[match[1]]
        return {str(sum(item.shape == shape for item in items))}
    match = re.fullmatch(r"Is there an? (\w+) (\w+)\?", question)
    assert match, question
    return {"yes" if any((item.colour, item.shape) == match.groups() for item in items) else "no"}


@pytest.mark.parametrize(("colours", "max_shapes"), [(8, 3), (2, 4), (8, 1)])
def test_every_question_has_exactly_one_right_answer(colours: int, max_shapes: int) -> None:
    dataset = scenes(caption_fraction=0, text_only_fraction=1, colours=colours, max_shapes=max_shapes)
    for index in range(1500):
        sample = dataset[index]
        items, question = told_items(sample)
        assert 1 <= len(items) <= max_shapes and len(set(items)) == len(items)
        assert {item.colour for item in items} <= set(list(COLOURS)[:colours])
        assert solve(question, items) == {sample.answer}, sample.prompt
        assert sample.answer in sample.choices and len(set(sample.choices)) == len(sample.choices)


def classify(rgb: np.ndarray) -> set[str]:
    """Colours of the picture by nearest value, counting only solid areas."""
    names = list(COLOURS)
    distance = np.abs(rgb[:, :, None, :].astype(int) - np.array(list(COLOURS.values()))).max(axis=3)
    return {name for i, name in enumerate(names) if (distance[:, :, i] < 6).sum() >= 6}


@pytest.mark.parametrize("size", [32, 64, 224])
def test_captions_tell_what_the_pixels_show(size: int) -> None:
    dataset = scenes(size=size, caption_fraction=1, max_shapes=4)
    for index in range(60):
        sample = dataset[index]
        assert sample.image is not None and sample.image.shape == (size, size, 3) and sample.image.dtype == np.uint8
        assert sample.choices == () and sample.prompt == "Describe the picture."
        assert classify(sample.image) == {colour for _, colour, _ in PHRASE.findall(sample.answer)}


def test_captions_list_the_shapes_in_reading_order() -> None:
    left, right = Placed(Shape("red", "circle", "large"), 0.2, 0.2), Placed(Shape("orange", "cross", "small"), 0.8, 0.3)
    below = Placed(Shape("blue", "square", "small"), 0.3, 0.8)
    assert caption([left]) == "a large red circle"
    assert caption([left, right, below]) == "a large red circle, a small orange cross and a small blue square"
    dataset = scenes(size=64, caption_fraction=1, max_shapes=4)
    checked = 0
    for index in range(150):
        sample = dataset[index]
        colours = [colour for _, colour, _ in PHRASE.findall(sample.answer)]
        if len(set(colours)) != len(colours) or len(colours) == 1:
            continue
        quarters = []
        for colour in colours:
            assert sample.image is not None
            ys, xs = np.nonzero(np.abs(sample.image.astype(int) - COLOURS[colour]).max(axis=2) < 6)
            quarters.append((ys.mean() >= 32, xs.mean() >= 32))
        assert quarters == sorted(quarters) and len(set(quarters)) == len(quarters)
        checked += 1
    assert checked > 50


@pytest.mark.parametrize("size", [32, 224])
def test_shapes_and_sizes_look_different(size: int) -> None:
    pictures = {
        (shape, extent): render([Placed(Shape("red", shape, extent), 0.5, 0.5)], (240, 240, 240), size).astype(int)
        for shape in SHAPES
        for extent in SIZES
    }
    for (_, one), (_, other) in itertools.combinations(pictures.items(), 2):
        changed = (np.abs(one - other).max(axis=2) > 90).mean()
        assert changed > 0.009  # at least 10 of the 1024 pixels at side 32
    for low, high in itertools.combinations(COLOURS.values(), 2):
        assert max(abs(a - b) for a, b in zip(low, high, strict=True)) >= 70
    assert all(min(colour) < 222 - 30 for colour in COLOURS.values())  # apart from the lightest and darkest ground


def test_the_mix() -> None:
    count = 4000
    plain = [scenes()[i] for i in range(count)]
    captions = [sample for sample in plain if not sample.choices]
    questions = [sample for sample in plain if sample.choices]
    assert abs(len(captions) / count - 0.25) < 0.03
    colour = [sample for sample in questions if sample.prompt.startswith("What colour")]
    assert abs(len(colour) / len(questions) - COLOUR_SHARE) < 0.03
    exists = Counter(sample.answer for sample in questions if sample.prompt.startswith("Is there"))
    assert exists.keys() == {"yes", "no"} and abs(exists["yes"] / exists.total() - 0.5) < 0.1
    answers = Counter(sample.answer for sample in colour)
    assert len(answers) == 8 and max(answers.values()) < 1.5 * min(answers.values())
    numbers = Counter(sample.answer for sample in questions if sample.prompt.startswith("How many"))
    assert set(numbers) >= {"0", "1", "2"} and max(numbers.values()) < 0.75 * numbers.total()


def test_fractions_hold_exactly_at_their_ends_and_do_not_interfere() -> None:
    dataset = scenes(caption_fraction=0.5, text_only_fraction=0.4)
    samples = [dataset[i] for i in range(2000)]
    for wanted, found in ((0.5, [not s.choices for s in samples]), (0.4, [s.image is None for s in samples])):
        assert abs(sum(found) / len(samples) - wanted) < 0.04
    assert all(scenes(text_only_fraction=1)[i].image is None for i in range(50))
    assert all(scenes(text_only_fraction=0)[i].image is not None for i in range(50))
    text_captions = [s for s in samples if s.image is None and not s.choices]
    assert text_captions and all(s.prompt.startswith("Write as one phrase: ") for s in text_captions)
    for sample in text_captions:
        listed = [tuple(part.split(", ")) for part in sample.prompt[21:-1].split("; ")]
        assert listed == [(shape, size, colour) for size, colour, shape in PHRASE.findall(sample.answer)]


def test_train_and_val_share_nothing() -> None:
    def prints(split: str) -> set[bytes]:
        dataset = scenes(split, val_samples=1500, caption_fraction=0.25)
        return {
            hashlib.sha256(sample.image.tobytes() + sample.prompt.encode()).digest()
            for sample in (dataset[i] for i in range(1500))
            if sample.image is not None
        }

    train, val = prints("train"), prints("val")
    assert len(train) == len(val) == 1500 and not train & val


def test_samples_depend_on_seed_split_and_index_alone() -> None:
    dataset = scenes(seed=3, val_samples=7, train_samples=9)
    assert isinstance(dataset, Dataset) and len(dataset) == 9 and len(scenes("val", val_samples=7)) == 7
    again = pickle.loads(pickle.dumps(dataset))
    backwards = [again[i] for i in reversed(range(9))][::-1]
    for i, other in enumerate(backwards):
        sample = dataset[i]
        assert (sample.key, sample.prompt, sample.answer) == (other.key, other.prompt, other.answer)
        assert sample.image is not None and other.image is not None and (sample.image == other.image).all()
    assert [s.answer for s in backwards] != [scenes(seed=4)[i].answer for i in range(9)]
    assert len({s.key for s in backwards}) == 9


def test_nonsense_is_refused() -> None:
    with pytest.raises(DataError, match="no split 'test'"):
        scenes("test")
    with pytest.raises(DataError, match="image_size=8"):
        scenes(size=8)
    for index in (-1, 9):
        with pytest.raises(IndexError, match="outside"):
            scenes(train_samples=9)[index]
