"""Scenes: the embedded data set. Coloured shapes on a plain ground, with questions that have one right answer.

Every sample is a pure function of (seed, split, index), made on the fly: no files, no downloads, any size.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from planaria.config import ScenesConfig
from planaria.data.errors import DataError
from planaria.data.render import COLOURS, SHAPES, SIZES, Placed, Shape, render
from planaria.data.sample import Sample

T = TypeVar("T")

COLOUR_SHARE = 0.7
"""Share of the questions that ask for a colour; the rest is split evenly over the other kinds."""
_OTHER_KINDS = ("shape", "count", "exists")


class Dice:
    """Random choices built on ``random.random`` alone, whose stream Python guarantees across versions."""

    def __init__(self, domain: str) -> None:
        digest = hashlib.blake2b(domain.encode(), digest_size=16).digest()
        self._next = random.Random(int.from_bytes(digest, "little")).random

    def uniform(self, low: float, high: float) -> float:
        """A number in [low, high)."""
        return low + (high - low) * self._next()

    def chance(self, probability: float) -> bool:
        """True with the given probability."""
        return self._next() < probability

    def pick(self, options: Sequence[T]) -> T:
        """One of ``options``."""
        return options[int(self._next() * len(options))]

    def several(self, options: Sequence[T], count: int) -> list[T]:
        """``count`` different members of ``options``, in random order."""
        left = list(options)
        return [left.pop(int(self._next() * len(left))) for _ in range(count)]


@dataclass(frozen=True)
class Question:
    """A question, its only right answer, and every answer that its form admits."""

    text: str
    answer: str
    choices: tuple[str, ...]


class Scenes:
    """Random-access data set of rendered scenes; see :class:`planaria.recipe.Dataset`.

    The splits draw from separate random streams. Samples are uint8 [image_size, image_size, 3], or have
    no image (``text_only_fraction``) and describe the scene in the prompt instead.
    """

    def __init__(
        self, config: ScenesConfig, split: str, image_size: int, seed: int, prompt: str = "Describe the picture."
    ) -> None:
        """
        Args:
            config: sizes and mix.
            split: ``"train"`` or ``"val"``.
            image_size: side of the pictures in pixels, at least 16.
            seed: any integer; another seed gives other scenes.
            prompt: what stands before a caption.

        Raises:
            DataError: an unknown split, or pictures too small to show a shape.
        """
        if split not in ("train", "val"):
            raise DataError("scenes", f"no split {split!r}", "use train or val")
        if image_size < 16:
            raise DataError("scenes", f"image_size={image_size} is too small to tell shapes apart", "use 16 or more")
        self.config = config
        self.split = split
        self.image_size = image_size
        self.seed = seed
        self.prompt = prompt
        self.colours = tuple(COLOURS)[: config.colours]

    def __len__(self) -> int:
        return self.config.train_samples if self.split == "train" else self.config.val_samples

    def __getitem__(self, index: int) -> Sample:
        """Sample ``index``, 0 <= index < len(self).

        Raises:
            IndexError: outside that range.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"scene {index} is outside 0..{len(self) - 1}")
        dice = Dice(f"planaria scenes {self.seed} {self.split} {index}")
        is_caption = dice.chance(self.config.caption_fraction)
        is_text_only = dice.chance(self.config.text_only_fraction)
        if is_caption:
            scene = self._scene(dice)
            question = Question(self.prompt, caption(scene), ())
        else:
            scene, question = self._scene_with_question(dice)
        key = f"scenes/{self.split}/{index}"
        if not is_text_only:
            ground = (dice.uniform(222, 252), dice.uniform(222, 252), dice.uniform(222, 252))
            image = render(scene, ground, self.image_size)
            return Sample(key, image, question.text, question.answer, question.choices)
        if is_caption:
            listed = "; ".join(f"{p.item.shape}, {p.item.size}, {p.item.colour}" for p in scene)
            return Sample(key, None, f"Write as one phrase: {listed}.", question.answer)
        told = f"There is {caption(scene)}. {question.text}"
        return Sample(key, None, told, question.answer, question.choices)

    def _scene(self, dice: Dice) -> list[Placed]:
        """Different shapes in reading order, each inside its own quarter of the picture: they cannot overlap."""
        count = 1 + int(dice.uniform(0, self.config.max_shapes))
        items: list[Shape] = []
        while len(items) < count:
            item = Shape(dice.pick(self.colours), dice.pick(SHAPES), dice.pick(tuple(SIZES)))
            if item not in items:
                items.append(item)
        placed: list[Placed] = []
        for item, cell in zip(items, sorted(dice.several(range(4), count)), strict=True):
            margin = SIZES[item.size] / 2 + 0.015
            # A lone shape may lie anywhere; several keep to their quarters.
            left, top, side = (0.0, 0.0, 1.0) if count == 1 else (0.5 * (cell % 2), 0.5 * (cell // 2), 0.5)
            x = dice.uniform(left + margin, left + side - margin)
            y = dice.uniform(top + margin, top + side - margin)
            placed.append(Placed(item, x, y))
        return placed

    def _scene_with_question(self, dice: Dice) -> tuple[list[Placed], Question]:
        # The kind comes first and the scene is drawn until it admits one, so that the mix holds exactly.
        kind = "colour" if dice.chance(COLOUR_SHARE) else dice.pick(_OTHER_KINDS)
        while True:
            scene = self._scene(dice)
            question = self._question(kind, [placed.item for placed in scene], dice)
            if question is not None:
                return scene, question

    def _question(self, kind: str, items: list[Shape], dice: Dice) -> Question | None:
        if kind == "colour":
            phrases = [(f"What colour is the {name}?", item.colour) for name, item in unique_by_shape(items)]
            return Question(*dice.pick(phrases), self.colours) if phrases else None
        if kind == "shape":
            phrases = [(f"What shape is the {name} one?", item.shape) for name, item in unique_by_colour(items)]
            return Question(*dice.pick(phrases), SHAPES) if phrases else None
        if kind == "count":
            # Mostly a shape that is there, or nearly every answer would be 0.
            shape = dice.pick(SHAPES) if dice.chance(0.25) else dice.pick(items).shape
            number = sum(item.shape == shape for item in items)
            numbers = tuple(str(i) for i in range(self.config.max_shapes + 1))
            return Question(f"How many {PLURALS[shape]} are there?", str(number), numbers)
        present = {(item.colour, item.shape) for item in items}
        absent = [(c, s) for c in self.colours for s in SHAPES if (c, s) not in present]
        is_there = dice.chance(0.5)
        colour, shape = dice.pick(sorted(present)) if is_there else dice.pick(absent)
        return Question(f"Is there {article(colour)} {shape}?", "yes" if is_there else "no", ("yes", "no"))


PLURALS = {"circle": "circles", "square": "squares", "triangle": "triangles", "cross": "crosses"}


def unique_by_shape(items: Sequence[Shape]) -> list[tuple[str, Shape]]:
    """(name, item) for every name without a colour, "circle" or "large circle", that fits one item only."""
    names = [(name, item) for item in items for name in (item.shape, f"{item.size} {item.shape}")]
    return _fitting_one(names)


def unique_by_colour(items: Sequence[Shape]) -> list[tuple[str, Shape]]:
    """(name, item) for every name without a shape, "red" or "large red", that fits one item only."""
    names = [(name, item) for item in items for name in (item.colour, f"{item.size} {item.colour}")]
    return _fitting_one(names)


def _fitting_one(names: list[tuple[str, Shape]]) -> list[tuple[str, Shape]]:
    every = [name for name, _ in names]
    return [(name, item) for name, item in names if every.count(name) == 1]


def article(phrase: str) -> str:
    """The phrase with its indefinite article."""
    return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"


def caption(scene: Sequence[Placed]) -> str:
    """ "a large red circle, a small blue square and a small pink cross": the shapes in reading order."""
    phrases = [article(f"{placed.item.size} {placed.item.colour} {placed.item.shape}") for placed in scene]
    head, last = phrases[:-1], phrases[-1]
    return f"{', '.join(head)} and {last}" if head else last
