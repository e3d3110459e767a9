"""The table finds what is wrong, says why something does not run, and a run goes on where another stopped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.vlm import vlm_job
from torch import Tensor

from planaria.commands import parity as command
from planaria.commands.failures import UsageError
from planaria.layout import Layout
from planaria.models.vlm import VLMRecipe
from planaria.parity.cell import Cell, Oracle, Oracles, measure
from planaria.parity.ranks import RankPool
from planaria.parity.report import notes, page, read, shown, write
from planaria.parity.steps import Shaken
from planaria.parity.table import FAMILIES, MOST_RANKS, VARIANTS, Family, Variant
from planaria.state.boxes import Box

LLAVA = FAMILIES[0]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(3) as ranks:
        yield ranks


class Wrong(Oracles):
    """An oracle that is off in one gradient."""

    def of(self, family: Family, job: object, optimizers: tuple[str, ...]) -> Oracle:
        oracle = super().of(family, job, optimizers)  # type: ignore[arg-type]
        gradients: dict[str, Tensor] = dict(oracle.gradients)
        gradients["lm_head.weight"] = gradients["lm_head.weight"] * (1 + 1e-7)
        return Oracle(gradients, oracle.parameters)


def test_what_differs_fails_and_is_named(pool: RankPool) -> None:
    gradients_only = Variant("x", Layout(), optimizers=())
    assert measure(pool, Oracles(), LLAVA, gradients_only).passed
    cell = measure(pool, Wrong(), LLAVA, gradients_only)
    assert cell.failed and cell.errors["gradients"] == pytest.approx(1e-7, rel=0.1)
    assert notes([cell]) == ["llava, x: failed: gradients differ by 1.0e-07, most in lm_head.weight"]


def test_what_an_engine_does_not_run_is_refused_with_the_reason(pool: RankPool) -> None:
    cell = measure(pool, Oracles(), LLAVA, Variant("tp 3", Layout(tp=3), optimizers=()))
    assert not cell.failed and not cell.passed and shown(cell) == "refused"
    assert "tp=3 does not divide text_config.num_attention_heads=4" in cell.refused
    assert "llava: tp 3: " in page([cell], "") and "0 passed, 0 failed, 1 refused" in page([cell], "")
    refused = measure(pool, Oracles(), LLAVA, Variant("x", Layout(), {"train.micro_batch": 0}, ()))
    assert "micro_batch" in refused.refused


def test_a_weight_is_never_what_a_fresh_one_is() -> None:
    recipe = VLMRecipe(vlm_job())
    state = Shaken(recipe, recipe.job)
    for name, parameter in recipe.build_model().named_parameters():
        whole = state.read(f"model/{name}", Box.whole(parameter.shape))
        assert len(whole.unique()) > 0.99 * whole.numel()
        box = Box((1, *(0,) * (whole.dim() - 1)), (1, *whole.shape[1:]))
        assert torch.equal(state.read(f"model/{name}", box), whole[1:2])


def test_names_are_chosen_by_patterns() -> None:
    assert [v.name for v in command.chosen("--layouts", "fsdp 2*;ddp 3*", VARIANTS)][:2] == ["fsdp 2", "ddp 3 (uneven)"]
    assert command.chosen("--families", None, FAMILIES) == FAMILIES
    with pytest.raises(UsageError, match="--families nope: matches none of llava;"):
        command.chosen("--families", "llava*,nope", FAMILIES)
    assert len({one.name for one in VARIANTS}) == len(VARIANTS) and len({f.name for f in FAMILIES}) == len(FAMILIES)
    assert max(variant.layout.world for variant in VARIANTS) <= MOST_RANKS


def test_a_run_keeps_what_has_passed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, md = tmp_path / "cells.json", tmp_path / "page.md"
    old = [Cell("llava", "single", {"gradients": 1e-13}, {"gradients": "w"}), Cell("llava", "fsdp 2", broken="died")]
    write(file, old, "here")
    assert read(file) == old
    assert command.parity("llava", "single", str(md), str(file), True) == 0
    assert "1e-13" in capsys.readouterr().out and "| llava | 1e-13 |" in md.read_text()
    file.write_text("{}")
    with pytest.raises(UsageError, match="holds no cells of planaria parity"):
        command.parity("llava", "single", None, str(file), True)
    with pytest.raises(UsageError, match="--resume needs --json"):
        command.parity(None, None, None, None, True)
