"""What a data set yields: pictures, or none, with a conversation about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
"""RGB picture, uint8 [height, width, 3]."""


@dataclass(frozen=True)
class Turn:
    """One question and its answer; only the answer carries loss."""

    prompt: tuple[str, ...]
    """Text with a picture between each two pieces: ``("", " and ", "?")`` holds two pictures."""
    answer: str

    @property
    def pictures(self) -> int:
        """How many pictures stand in the prompt."""
        return len(self.prompt) - 1


@dataclass(frozen=True, eq=False)
class Sample:
    """One image-text pair, or a conversation. Equality is identity, since arrays have no truth value."""

    key: str
    """Names the sample in logs: unique within its data set."""
    image: Pixels | None
    """uint8 [H, W, 3]: the (first) picture, or None for a text-only sample."""
    prompt: str
    """The (first) question, without its pictures."""
    answer: str
    """The (first) answer."""
    choices: tuple[str, ...] = ()
    """All answers that the form of the question admits (chance level: 1 / len(choices)); empty for captions."""
    more_images: tuple[Pixels, ...] = ()
    """The second picture and all after it, in the order in which they stand in ``turns``."""
    turns: tuple[Turn, ...] = ()
    """The whole conversation; empty where it is ``prompt`` and ``answer``, with the picture before them."""

    @property
    def images(self) -> tuple[Pixels, ...]:
        """All pictures."""
        return () if self.image is None else (self.image, *self.more_images)

    @property
    def conversation(self) -> tuple[Turn, ...]:
        """The turns, at least one, with as many places for pictures as there are pictures."""
        if self.turns:
            return self.turns
        text = f"\n{self.prompt}"
        return (Turn((text,) if self.image is None else ("", text), self.answer),)


def conversation_sample(key: str, images: Sequence[Pixels], turns: Sequence[Turn]) -> Sample:
    """The sample of a conversation.

    Raises:
        ValueError: no turn, or not one place for each picture.
    """
    places = sum(turn.pictures for turn in turns)
    if not turns or places != len(images):
        raise ValueError(f"sample {key}: {len(turns)} turns with places for {places} pictures, but {len(images)} given")
    first, *more = images or (None,)
    question = " ".join(piece.strip() for piece in turns[0].prompt if piece.strip())
    return Sample(key, first, question, turns[0].answer, (), tuple(p for p in more if p is not None), tuple(turns))
