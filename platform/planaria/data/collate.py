"""Samples to the arrays of one forward pass of a vision-language model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planaria.data.images import fit, normalise
from planaria.data.sample import Pixels, Sample, Turn
from planaria.data.tokens import TextCodec
from planaria.recipe import MicroBatch, PixelScale

IGNORE = -100
"""Label of a position that carries no loss."""

Pack = Callable[
    [NDArray[np.float32], Sequence[int], NDArray[np.int64], NDArray[np.bool_]], dict[str, NDArray[np.generic]]
]
"""``pack(pixels_N3SS, counts, mask_BL, placeholders_BL)``: the model's picture inputs.

``pixels`` are the normalised pictures in the order of the rows, ``counts`` says how many each row has, and
``placeholders`` marks their tokens. The first dimension of what it makes need not be the batch, so a micro-batch is
never cut by rows.
"""


@dataclass
class _Row:
    """One row without padding."""

    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    pictures: int = 0
    """Pictures whose placeholders are in ``ids``."""

    def add(self, ids: Sequence[int], learn: bool = False) -> None:
        self.ids += ids
        self.labels += ids if learn else [IGNORE] * len(ids)


class VLMCollator:
    """Builds ``input_ids``, ``attention_mask``, ``labels`` (int64 [B, L]) and the model's picture inputs.

    By default these are ``pixel_values`` (uint8 [N, 3, S, S], which the engine scales on its device).

    A row is ``image_tokens`` placeholders (if it has an image), newline, prompt, newline, answer, end of sequence;
    in a conversation this repeats, and pictures stand where its prompts have them. N is the number of pictures, in
    the order of rows and places. Labels stand at answers and their ends, and are NOT shifted: the model shifts. L is
    a multiple of ``pad_multiple`` and never exceeds ``max_length``.
    """

    def __init__(
        self,
        codec: TextCodec,
        image_tokens: int,
        image_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        max_length: int,
        pad_multiple: int = 8,
        pack: Pack | None = None,
    ) -> None:
        """
        Args:
            codec: the tokenizer.
            image_tokens: placeholders per image, as many as the vision tower yields.
            image_size: S, side of the pictures in pixels.
            mean: per channel, in 0..1.
            std: per channel, positive.
            max_length: most tokens of a row, placeholders included.
            pad_multiple: L is rounded up to a multiple of this.
            pack: makes the model's picture inputs; by default ``pixel_values`` as they are.

        Raises:
            ValueError: a size that cannot work, or no room for a prompt and a target behind the placeholders.
        """
        for name, value in {
            "image_tokens": image_tokens,
            "image_size": image_size,
            "pad_multiple": pad_multiple,
        }.items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if len(mean) != 3 or len(std) != 3 or not all(deviation > 0 for deviation in std):
            raise ValueError(f"mean={list(mean)} and std={list(std)} must hold three values each, std positive ones")
        self.row_limit = max_length // pad_multiple * pad_multiple
        """Most tokens of a row: ``max_length`` rounded down, so that padding cannot exceed it."""
        if self.row_limit < image_tokens + 2:
            raise ValueError(
                f"max_length={max_length} (rounded down to {self.row_limit}, a multiple of {pad_multiple}) has no room "
                f"for {image_tokens} image placeholders, a prompt and an answer; raise data.max_length to at least "
                f"{-(-(image_tokens + 2) // pad_multiple) * pad_multiple}"
            )
        self.codec = codec
        self._pack = pack
        self.image_tokens = image_tokens
        self.image_size = image_size
        self.mean = tuple(mean)
        self.std = tuple(std)
        self.pad_multiple = pad_multiple

    def __call__(self, samples: Sequence[Sample], weights: Sequence[int]) -> MicroBatch:
        """Arrays of the samples, in order; a weight of 0 takes all labels of its row away.

        If no sample has an image, one more row is appended, of weight 0 and with a blank image: the vision tower
        must run in every forward pass, since a rank that skips it leaves the others waiting in its collectives.

        Raises:
            ValueError: no samples, not one weight for each, or more pictures in a first question than
                :attr:`most_pictures`.
        """
        if not samples or len(samples) != len(weights):
            raise ValueError(f"{len(samples)} samples with {len(weights)} weights")
        rows = [self._row(sample, weight) for sample, weight in zip(samples, weights, strict=True)]
        pictures: list[Pixels] = []
        for sample, row in zip(samples, rows, strict=True):
            pictures += sample.images[: row.pictures]
        if not pictures:
            pictures.append(np.full((self.image_size, self.image_size, 3), 255, dtype=np.uint8))
            blank = _Row(pictures=1)
            blank.add([self.codec.image_id] * self.image_tokens + [self.codec.eos_id])
            rows.append(blank)
        padded = self._pad(rows)
        arrays: dict[str, NDArray[np.generic]] = dict(padded)
        placeholders_BL = padded["input_ids"] == self.codec.image_id
        found = int((placeholders_BL & (padded["attention_mask"] == 1)).sum())
        if found != len(pictures) * self.image_tokens:
            raise ValueError(f"{found} placeholders for {len(pictures)} pictures of {self.image_tokens} features each")
        pixels_N3SS = np.empty((len(pictures), 3, self.image_size, self.image_size), np.uint8)
        for picture, place in zip(pictures, pixels_N3SS, strict=True):
            fit(picture, self.image_size, out=place)
        scales: dict[str, PixelScale] = {}
        if self._pack is None:
            arrays["pixel_values"] = pixels_N3SS
            scales["pixel_values"] = PixelScale(self.mean, self.std)
        else:
            scaled_N3SS = normalise(pixels_N3SS, self.mean, self.std)
            counts = [row.pictures for row in rows]
            arrays |= self._pack(scaled_N3SS, counts, padded["attention_mask"], placeholders_BL)
        return MicroBatch(
            arrays=arrays,
            # Position 0 predicts nothing: the shifted loss never sees its label.
            targets=int((arrays["labels"][:, 1:] != IGNORE).sum()),
            tokens=sum(len(row.ids) for row, weight in zip(rows, weights, strict=False) if weight),
            scales=scales,
        )

    @property
    def most_pictures(self) -> int:
        """Pictures of one question that leave room for a prompt and an answer."""
        return (self.row_limit - 2) // self.image_tokens

    def _row(self, sample: Sample, weight: int) -> _Row:
        """The turns that fit. A later one is left out, with its pictures, where no answer fits behind its question."""
        row = _Row()
        for turn in sample.conversation:
            head, prompt = self._question(turn)
            # At least one token stands before the answer: a label at position 0 would never count.
            prompt = prompt or [self.codec.eos_id]
            answer = [*self.codec.encode(turn.answer), self.codec.eos_id]
            room = self.row_limit - len(row.ids) - len(head)
            if row.ids and room <= len(prompt):
                break
            if room < 2:
                head = self._shortened(head, 2 - room)
                room = self.row_limit - len(head)
            if room < 2:
                raise ValueError(
                    f"sample {sample.key}: {turn.pictures} pictures of {self.image_tokens} placeholders each do not "
                    f"fit into {self.row_limit} tokens; raise data.max_length"
                )
            # Placeholders are never cut. A long answer loses its end (with the end mark: it is not over), and keeps
            # at least half of the room; a long prompt loses its beginning, since the question comes last.
            answer = answer[: max(room - len(prompt), room // 2)]
            row.add(head + prompt[max(0, len(prompt) - (room - len(answer))) :])
            row.add(answer, learn=bool(weight))
            row.pictures += turn.pictures
        return row

    def _shortened(self, ids: Sequence[int], surplus: int) -> list[int]:
        """``ids`` without the first ``surplus`` tokens of text; placeholders stay."""
        text = [at for at, token in enumerate(ids) if token != self.codec.image_id]
        gone = set(text[:surplus])
        return [token for at, token in enumerate(ids) if at not in gone]

    def _question(self, turn: Turn) -> tuple[list[int], list[int]]:
        """Ids up to the last placeholder, and those behind it."""
        head: list[int] = []
        for piece in turn.prompt[:-1]:
            head += self.codec.encode(piece) + [self.codec.image_id] * self.image_tokens
        return head, self.codec.encode(f"{turn.prompt[-1]}\n")

    def _pad(self, rows: Sequence[_Row]) -> dict[str, NDArray[np.int64]]:
        longest = max(len(row.ids) for row in rows)
        shape_BL = (len(rows), -(-longest // self.pad_multiple) * self.pad_multiple)
        input_ids = np.full(shape_BL, self.codec.pad_id, dtype=np.int64)
        attention_mask = np.zeros(shape_BL, dtype=np.int64)
        labels = np.full(shape_BL, IGNORE, dtype=np.int64)
        for at, row in enumerate(rows):
            input_ids[at, : len(row.ids)] = row.ids
            attention_mask[at, : len(row.ids)] = 1
            labels[at, : len(row.ids)] = row.labels
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
