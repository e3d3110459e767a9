"""The learning rate: a pure function of the step, with the published shapes."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.config import ScheduleConfig
from planaria.engine.schedule import lr_factor

KINDS = st.sampled_from(["constant", "linear", "cosine"])


@given(kind=KINDS, total=st.integers(1, 500), warmup=st.integers(0, 50), floor=st.floats(0, 1))
def test_the_factor_rises_to_one_and_falls_to_the_floor(kind: str, total: int, warmup: int, floor: float) -> None:
    warmup = min(warmup, total - 1)
    schedule = ScheduleConfig(kind=kind, warmup_steps=warmup, min_ratio=floor)  # type: ignore[arg-type]
    factors = [lr_factor(step, total, schedule) for step in range(total)]
    rising, falling = factors[:warmup], factors[warmup:]
    assert rising == [(step + 1) / warmup for step in range(warmup)]
    assert falling[0] == pytest.approx(1)
    assert all(before >= after - 1e-12 for before, after in itertools.pairwise(falling))
    end = 1 if kind == "constant" or len(falling) == 1 else floor
    assert falling[-1] == pytest.approx(end)
    assert lr_factor(total + 10, total, schedule) == pytest.approx(1 if kind == "constant" else floor)
    # Pure: any order of questions gives the same answers, so there is no state to lose.
    assert [lr_factor(step, total, schedule) for step in reversed(range(total))] == factors[::-1]


def test_the_middle_of_each_curve() -> None:
    for kind, middle in (("constant", 1.0), ("linear", 0.6), ("cosine", 0.6)):
        assert lr_factor(50, 101, ScheduleConfig(kind=kind, min_ratio=0.2)) == pytest.approx(middle)  # type: ignore[arg-type]
    quarter = lr_factor(25, 101, ScheduleConfig(kind="cosine", min_ratio=0.0))
    assert quarter == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
