"""Recall among held-out pairs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from planaria.objectives.retrieval import DEPTHS, recall_counts
from planaria.observe.text import score_text


def pieces(rows: Tensor) -> Iterator[Tensor]:
    yield from rows.split(4)


@settings(max_examples=30, deadline=None)
@given(pairs=st.integers(1, 30), noise=st.floats(0, 3), seed=st.integers(0, 1000))
def test_recall_is_what_sorting_all_candidates_says(pairs: int, noise: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    image = normalize(torch.randn(pairs, 5, generator=generator).double())
    text = normalize(image + noise * torch.randn(pairs, 5, generator=generator).double())
    samples, *found = recall_counts(image, text, pieces).tolist()
    expected = []
    for similar in (image @ text.T, text @ image.T):
        order = similar.argsort(dim=1, descending=True)
        place = (order == torch.arange(pairs)[:, None]).int().argmax(1)
        expected += [(place < depth).sum().item() for depth in DEPTHS]
    assert samples == pairs
    assert found == pytest.approx(expected)


def test_an_encoder_that_maps_everything_to_one_point_is_worth_a_guess() -> None:
    same = normalize(torch.ones(20, 3))
    samples, *found = recall_counts(same, same, pieces).tolist()
    assert [count / samples for count in found] == pytest.approx([1 / 20, 5 / 20, 10 / 20] * 2)


def test_a_caption_that_occurs_twice_is_found_every_other_time() -> None:
    image = normalize(torch.eye(3) + 0.01 * torch.arange(9.0).view(3, 3))
    twice = image.clone()
    twice[1] = twice[0]
    _, first, *_ = recall_counts(torch.stack([image[0], image[0], image[2]]), twice, pieces).tolist()
    assert first == pytest.approx(0.5 + 0.5 + 1)


def test_what_is_not_a_number_is_not_found() -> None:
    image = normalize(torch.eye(4))
    image[0] = torch.nan
    assert recall_counts(image, normalize(torch.eye(4)), pieces).tolist() == [4, 3, 3, 3, 3, 3, 3]


def test_the_score_is_told_beside_chance() -> None:
    scores = {f"{way}_{depth}": 0.5 for way in ("image_to_text", "text_to_image") for depth in DEPTHS}
    assert score_text(scores | {"samples": 200}) == (
        "recall at 1 / 5 / 10 among 200 pairs: image to text 50.0 / 50.0 / 50.0%; "
        "text to image 50.0 / 50.0 / 50.0%; chance is 0.5 / 2.5 / 5.0%"
    )
