"""Samples to the arrays of one forward pass of a dual encoder."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planaria.data.images import fit
from planaria.data.sample import Sample
from planaria.data.tokens import TextCodec
from planaria.recipe import MicroBatch, PixelScale

PAD_MULTIPLE = 8


class PairCollator:
    """Builds ``input_ids`` (int64 [B, L]), ``pixel_values`` (float32 [B, 3, S, S]) and ``weights`` (float32 [B]).

    A row of ids is the tokenizer's beginning of sequence, if it has one, the caption (a sample's ``answer``), cut if
    need be, and the end of sequence, which is never cut: CLIP pools there.
    """

    def __init__(
        self,
        codec: TextCodec,
        image_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        max_length: int,
        *,
        pad_to_max: bool,
    ) -> None:
        """
        Args:
            codec: the tokenizer.
            image_size: S, side of the pictures in pixels.
            mean: per channel, in 0..1.
            std: per channel, positive.
            max_length: most ids of a row.
            pad_to_max: every row has ``max_length`` ids, so that what a model makes of padding does not depend on
                which rows meet; else the longest of a batch, rounded up, sets L.
        """
        bos = codec.tokenizer.bos_token_id
        self._codec = codec
        self._head: list[int] = [] if bos is None else [int(bos)]
        self._image_size, self._mean, self._std = image_size, tuple(mean), tuple(std)
        self._max_length, self._pad_to_max = max_length, pad_to_max

    def __call__(self, samples: Sequence[Sample], weights: Sequence[int]) -> MicroBatch:
        """Arrays of the samples, in order; a pair of weight 0 counts neither as a positive nor as a negative.

        Raises:
            ValueError: no samples, not one weight for each, or a sample without a picture.
        """
        if not samples or len(samples) != len(weights):
            raise ValueError(f"{len(samples)} samples with {len(weights)} weights")
        if bare := [sample.key for sample in samples if sample.image is None]:
            raise ValueError(f"samples without a picture make no pairs: {', '.join(bare)}")
        rows = [self._row(sample.answer) for sample in samples]
        longest = max(map(len, rows))
        length = self._max_length
        if not self._pad_to_max:
            length = min(length, -(-longest // PAD_MULTIPLE) * PAD_MULTIPLE)
        input_ids = np.full((len(rows), length), self._codec.pad_id, dtype=np.int64)
        for place, row in enumerate(rows):
            input_ids[place, : len(row)] = row
        pictures = [sample.image for sample in samples if sample.image is not None]
        return MicroBatch(
            arrays={
                "input_ids": input_ids,
                "pixel_values": np.stack([fit(picture, self._image_size) for picture in pictures]),
                "weights": np.asarray(weights, dtype=np.float32),
            },
            targets=sum(weights),
            tokens=sum(len(row) for row, weight in zip(rows, weights, strict=True) if weight),
            scales={"pixel_values": PixelScale(self._mean, self._std)},
        )

    def _row(self, caption: str) -> list[int]:
        room = self._max_length - len(self._head) - 1
        return [*self._head, *self._codec.encode(caption)[:room], self._codec.eos_id]
