"""What context parallelism has of its own: padding on either side, scores, heads that are shared, refusals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tests.support.ranks import RankPool
from tests.support.vlm import Held, Reference, assemble, batches, engine_of, held, relative_errors, step, vlm_job
from torch import Tensor, nn

from planaria.config import ConfigError, JobConfig
from planaria.engine.facts import model_facts
from planaria.engine.tensor_parallel import ShardingError
from planaria.layout import Layout
from planaria.models.vlm import VLMRecipe
from planaria.recipe import MicroBatch, logits_part
from planaria.runtime.groups import Groups

LIMIT = 1e-10


class LeftPadded(VLMRecipe):
    """Rows end where the batch ends, as for generation; positions are counted from where they begin."""

    def collate(self, samples: Any, weights: Any) -> MicroBatch:
        batch = super().collate(samples, weights)
        lengths = batch.arrays["attention_mask"].sum(1)
        for key in ("input_ids", "attention_mask", "labels"):
            for row, length in zip(batch.arrays[key], lengths, strict=True):
                row[:] = list(row[length:]) + list(row[:length])
        return batch


def _gradients(groups: Groups, job: JobConfig) -> tuple[float, Held]:
    engine = engine_of(groups, LeftPadded(job), job)
    taken: list[Held] = []
    result = step(engine, on_gradients=lambda: taken.append(held(engine, gradients=True)))
    return result.loss, taken[0]


def test_padding_may_stand_on_the_left(pool: RankPool) -> None:
    job = vlm_job(train__micro_batch=8)
    reference = Reference(LeftPadded(job), job)
    loss = reference.backward()
    answers = pool.run(Layout(cp=2), _gradients, job)
    errors = relative_errors(assemble(part for _, part in answers), reference.gradients())
    assert max(errors.values()) < LIMIT
    assert answers[0][0] == pytest.approx(loss, rel=LIMIT)


def test_a_part_of_the_sequence_may_hold_padding_alone() -> None:
    """Otherwise the tests of parity would say nothing of it."""
    job = vlm_job()
    masks = [batch.arrays["attention_mask"] for batch in batches(VLMRecipe(job), job, 0, 0, 1)]
    assert any((mask[:, mask.shape[1] // 2 :].sum(1) == 0).any() for mask in masks)


# Scores


class Confident(VLMRecipe):
    """A recipe whose model is right about every second row: what it predicts is made of the labels."""

    def score(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        labels = batch["labels"]
        wrong_B = torch.arange(len(labels)) % 2 == 1
        handle = model.lm_head.register_forward_hook(  # type: ignore[union-attr]
            lambda _head, _args, out: _oracle(out, labels, wrong_B, model)
        )
        try:
            return super().score(model, batch)
        finally:
            handle.remove()


def _oracle(out_Blv: Tensor, labels_BL: Tensor, wrong_B: Tensor, model: nn.Module) -> Tensor:
    """This rank's part of logits that are right, but for the last target of the rows ``wrong_B``."""
    part, V = logits_part(model), model.config.text_config.vocab_size  # type: ignore[union-attr]
    next_BL = labels_BL.roll(-1, 1).clamp(min=0)
    whole_BLV = nn.functional.one_hot(next_BL, V).to(out_Blv.dtype)
    for row in wrong_B.nonzero().flatten():
        last = int((labels_BL[row] >= 0).nonzero()[-1]) - 1
        whole_BLV[row, last] = whole_BLV[row, last].roll(1)
    for group, dim in ((part.sequence, 1), (part.vocabulary, 2)):
        if group is not None:
            whole_BLV = whole_BLV.chunk(group.size(), dim)[group.rank()]
    assert whole_BLV.shape == out_Blv.shape
    return whole_BLV


def _scores(groups: Groups, job: JobConfig) -> list[float]:
    recipe = Confident(job)
    engine = engine_of(groups, recipe, job)
    part, layout = logits_part(engine.model), engine.layout
    assert (part.sequence is not None, part.vocabulary is not None) == (layout.cp > 1, layout.tp > 1)
    (batch,) = batches(recipe, job, 0, 0, 1)
    return engine.score(batch).tolist()


@pytest.mark.parametrize("layout", [Layout(), Layout(cp=2), Layout(tp=2), Layout(cp=2, tp=2)], ids=str)
def test_rows_are_scored_whole(pool: RankPool, layout: Layout) -> None:
    job = vlm_job(train__micro_batch=8)
    (batch,) = batches(VLMRecipe(job), job, 0, 0, 1)
    targets = (batch.arrays["labels"] >= 0).any(1)
    for scores in pool.run(layout, _scores, job):
        assert scores == [float(row % 2 == 0 or not has) for row, has in enumerate(targets)]


# Refusals


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"layout__cp": 8}, r"layout.cp: cp=8 with tp=1: 8 does not divide text_config.num_attention_heads=4; choose"),
        ({"layout__cp": 4, "layout__tp": 2}, "layout.cp: cp=4 with tp=2: 8 does not divide"),
    ],
)
def test_heads_that_do_not_suffice(overrides: dict[str, Any], message: str) -> None:
    job = vlm_job(**overrides)
    with pytest.raises(ConfigError, match=message):
        model_facts(VLMRecipe(job), job)


class WholeLogits(VLMRecipe):
    partial_logits = False


def test_a_loss_that_needs_whole_sequences() -> None:
    job = vlm_job(layout__cp=2)
    with pytest.raises(ConfigError, match="the loss of WholeLogits needs whole sequences; heed logits_part"):
        model_facts(WholeLogits(job), job)


class Bypassing(VLMRecipe):
    """Its attention does not ask the registry."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        for layer in model.model.language_model.layers:  # type: ignore[union-attr]
            layer.self_attn.forward = lambda hidden_states, **_: (hidden_states, None)  # type: ignore[union-attr]
        return model


def _forward(groups: Groups, job: JobConfig) -> str:
    recipe = Bypassing(job)
    engine = engine_of(groups, recipe, job)
    with pytest.raises(ShardingError) as caught:
        engine.score(batches(recipe, job, 0, 0, 1)[0])
    return str(caught.value)


def test_attention_that_bypasses_the_interface_is_found_out(pool: RankPool) -> None:
    for message in pool.run(Layout(cp=2), _forward, vlm_job()):
        assert message.startswith("the attention of model.language_model.layers.0 does not go through transformers'")
