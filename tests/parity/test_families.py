"""A covering subset of ``planaria parity``: every family on a layout that cuts it in two ways, gradients alone."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from tests.support.forms import long_form

from planaria.layout import Layout
from planaria.parity.cell import Oracles, measure
from planaria.parity.ranks import RankPool
from planaria.parity.report import notes
from planaria.parity.table import FAMILIES, VARIANTS, Family, Variant

CUT = Variant("tp 2 + sp", Layout(tp=2), optimizers=())
ELSEWHERE = ("llava", "llava-siglip-qwen", "clip", "siglip")
"""Families that the engine's own tests take."""


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(8 if os.environ.get("PLANARIA_LONG") else 2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def oracles() -> Oracles:
    return Oracles()


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name not in ELSEWHERE], ids=lambda family: family.name)
def test_gradients_under_tensor_parallelism(pool: RankPool, oracles: Oracles, family: Family) -> None:
    cell = measure(pool, oracles, family, CUT)
    assert cell.passed, notes([cell])


@long_form
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_whole_table(pool: RankPool, oracles: Oracles, family: Family, variant: Variant) -> None:
    cell = measure(pool, oracles, family, variant)
    assert not cell.failed, notes([cell])
