"""Losses by own rows and blocks of columns, against the dense definition and against transformers' own."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.dual import dual_job
from tests.support.vlm import batches
from torch import Tensor
from torch.nn.functional import normalize
from transformers import CLIPModel, SiglipModel

from planaria.engine.batches import to_device
from planaria.models.dual import DualEncoderRecipe
from planaria.objectives.contrastive import own_rows_loss, whole_batch_loss
from planaria.recipe import Contrast

KINDS = ("softmax", "sigmoid")


def contrast(kind: str) -> Contrast:
    return Contrast(kind, "scale", "bias", 1)  # type: ignore[arg-type]


def leaf(value: Tensor) -> Tensor:
    return value.double().requires_grad_()


@settings(max_examples=40, deadline=None)
@example(kind="sigmoid", pairs=2, dim=1, columns=1, log_scale=2.5, bias=8.0, seed=0)  # large logits of negatives
@given(
    kind=st.sampled_from(KINDS),
    pairs=st.integers(1, 9),
    dim=st.integers(1, 5),
    columns=st.integers(1, 10),
    log_scale=st.floats(0, math.log(100)),
    bias=st.floats(-12, 12),
    seed=st.integers(0, 1000),
)
def test_blocks_of_columns_give_the_loss_and_gradients_of_the_whole_matrix(
    kind: str, pairs: int, dim: int, columns: int, log_scale: float, bias: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    image, text = (leaf(normalize(torch.randn(pairs, dim, generator=generator).double())) for _ in range(2))
    scale, shift = leaf(torch.tensor([log_scale])), leaf(torch.tensor([bias]))
    whole = whole_batch_loss(contrast(kind), image, text, scale, shift)
    whole.backward()
    seen: list[int] = []

    def blocks(rows: Tensor) -> Iterator[Tensor]:
        for block in rows.split(columns):
            seen.append(len(block))
            yield block

    found = own_rows_loss(kind, image.detach(), text.detach(), scale.detach()[0], shift.detach()[0], blocks)
    size = max(1.0, math.exp(log_scale) * pairs)  # rounding is relative to the terms that nearly cancel
    assert max(seen) <= columns
    assert abs(found.loss.item() - whole.item()) < 1e-12 * size
    assert image.grad is not None and text.grad is not None and scale.grad is not None
    for mine, theirs in ((found.image_ND, image.grad), (found.text_ND, text.grad), (found.scale, scale.grad[0])):
        assert (mine - theirs).abs().max() < 1e-12 * size
    if kind == "sigmoid":
        assert shift.grad is not None
        assert abs(found.bias.item() - shift.grad.item()) < 1e-12 * size


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_without_pairs_has_no_share(kind: str) -> None:
    others = normalize(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).double())

    def blocks(rows: Tensor) -> Iterator[Tensor]:
        extra = rows.shape[1] - 6
        yield torch.cat([others, others.new_ones(4, extra)], dim=1)

    none = torch.empty(0, 3, dtype=torch.float64)
    found = own_rows_loss(kind, none, none, torch.tensor(1.0).double(), torch.tensor(-1.0).double(), blocks)
    assert found.loss == 0 and found.scale == 0 and found.bias == 0
    assert found.image_ND.shape == found.text_ND.shape == (0, 3)


def test_chance_is_the_logarithm_of_the_batch() -> None:
    """Where all features are alike, a softmax over B candidates costs log B per pair."""
    same = normalize(torch.ones(7, 4).double())
    found = own_rows_loss(
        "softmax", same, same, torch.tensor(2.0).double(), torch.tensor(0.0).double(), lambda r: iter([r])
    )
    assert found.loss.item() == pytest.approx(7 * math.log(7))


@pytest.mark.parametrize(("preset", "cls"), [("clip-tiny", CLIPModel), ("siglip-tiny", SiglipModel)])
def test_the_loss_of_one_process_is_that_of_transformers(preset: str, cls: type) -> None:
    job = dual_job(preset, train__micro_batch=5)
    recipe = DualEncoderRecipe(job)
    torch.manual_seed(1)
    model = cls(recipe.config).double()
    batch = to_device(batches(recipe, job, 0, 0, 1)[0], torch.device("cpu"))
    batch["pixel_values"] = batch["pixel_values"].double()
    ours = recipe.loss(model, batch)
    theirs = model(input_ids=batch["input_ids"], pixel_values=batch["pixel_values"], return_loss=True).loss
    assert ours.item() == pytest.approx(5 * theirs.item(), rel=1e-12)
