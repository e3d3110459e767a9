"""The search for a loss scale: as arithmetic, and in steps of half precision on real layouts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.ranks import RankPool
from tests.support.saving import save
from tests.support.vlm import engine_of, step, vlm_job

from planaria.config import ConfigError, JobConfig, LossScaleConfig
from planaria.engine.loss_scale import GREATEST, LEAST, LossScale
from planaria.engine.protocol import GOOD_STEPS, SCALE, StepResult
from planaria.layout import Layout
from planaria.models.vlm import VLMRecipe
from planaria.runtime.groups import Groups
from planaria.state.boxes import Box
from planaria.state.vault import Vault

CONFIG = LossScaleConfig(initial=1024.0, interval=3)


def test_an_overflow_halves_and_good_steps_double() -> None:
    scale = LossScale(CONFIG.initial)
    seen = []
    for overflow in (False, False, True, False, False, False, False):
        scale = scale.after(CONFIG, overflow=overflow)
        seen.append((scale.scale, scale.good_steps))
    assert seen == [(1024, 1), (1024, 2), (512, 0), (512, 1), (512, 2), (1024, 0), (1024, 1)]


@given(st.lists(st.booleans(), max_size=120), st.integers(1, 4), st.sampled_from([0.5, 0.25]))
def test_the_scale_is_always_a_power_of_two_within_bounds(overflows: list[bool], interval: int, backoff: float) -> None:
    config, scale = LossScaleConfig(initial=256.0, interval=interval, backoff=backoff), LossScale(256.0)
    for overflow in overflows:
        scale = scale.after(config, overflow=overflow)
        assert math.frexp(scale.scale)[0] == 0.5 and LEAST <= scale.scale <= GREATEST
        assert 0 <= scale.good_steps < interval


def test_only_a_gradient_that_was_magnified_is_an_overflow() -> None:
    assert LossScale(2.0).to_blame(loss_finite=True, gradient_finite=False)
    assert not LossScale(2.0).to_blame(loss_finite=False, gradient_finite=False), "the loss is never scaled"
    assert not LossScale(LEAST).to_blame(loss_finite=True, gradient_finite=False), "nothing is left to search"
    assert not LossScale(2.0).to_blame(loss_finite=True, gradient_finite=True)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("train__loss_scale", {"initial": 1000.0}, "nearest is 1024"),
        ("train__loss_scale", {"backoff": 0.4}, "nearest is 0.5"),
        ("train__reduce_precision", "bf16", "precision=fp64"),
    ],
)
def test_what_would_round_gradients_is_refused(key: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        vlm_job(**{key: value})


def test_fp16_reductions_need_a_loss_scale() -> None:
    with pytest.raises(ConfigError, match="overflows without loss scaling"):
        vlm_job(train__precision="bf16", train__reduce_precision="fp16")
    assert vlm_job(train__precision="fp16", train__reduce_precision="fp16").train.reduce_precision == "fp16"


# On ranks

State = dict[str, torch.Tensor]

LAYERS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL: dict[str, Any] = {
    "model_type": "llava",
    "vision_config": {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 8, **LAYERS},
    "text_config": {"model_type": "llama", "num_key_value_heads": 2, **LAYERS},
}
"""Half precision is slow on CPUs."""


def _job(**overrides: Any) -> JobConfig:
    small = {"model": {"config": SMALL}, "train__global_batch": 2, "train__micro_batch": 2, "optim__lr": 3e-3}
    return vlm_job(**(small | {"train__precision": "fp16"} | overrides))


def _leg(
    groups: Groups, job: JobConfig, folder: str, begin: int, steps: int
) -> tuple[list[StepResult], State, State, int]:
    """Steps on the state of ``begin``; the scaler's state and the updates at the end, and what of the rest changed."""
    engine = engine_of(groups, VLMRecipe(job), job)
    if begin:
        with Vault(folder).at(begin) as checkpoint:
            engine.load(checkpoint)
    before = {h.tensor: h.value.clone() for h in engine.state()}
    results = [step(engine) for _ in range(steps)]
    save(engine, Vault(folder), f"from-{begin}")
    after = {h.tensor: h.value.clone() for h in engine.state()}
    changed = {n: v for n, v in after.items() if not torch.equal(v, before[n]) and not n.startswith("optim/scaler/")}
    return results, {n: v for n, v in after.items() if n.startswith("optim/scaler/")}, changed, engine.optimizer.updates


def test_an_overflow_skips_on_all_ranks_and_the_search_survives_a_reshard(pool: RankPool, tmp_path: Path) -> None:
    # 2^24 is beyond what float16 gradients of this model hold: the first steps overflow, and nothing else is wrong.
    job = _job(train__loss_scale={"initial": 2.0**24, "backoff": 2.0**-5, "interval": 2})
    first = pool.run(Layout(dp_shard=2), _leg, job, str(tmp_path), 0, 2)
    for results, scaler, changed, updates in first:
        assert [(r.skipped, r.overflow, r.loss_scale) for r in results] == [
            (True, True, 2.0**24),
            (True, True, 2.0**19),
        ]
        assert all(math.isfinite(r.loss) for r in results)
        assert scaler == {SCALE: torch.tensor(2.0**14), GOOD_STEPS: torch.tensor(0)}
        assert not changed and not updates
    for results, scaler, changed, updates in pool.run(Layout(tp=2), _leg, job, str(tmp_path), 2, 3):
        assert [(r.skipped, r.loss_scale) for r in results] == [(False, 2.0**14), (False, 2.0**14), (False, 2.0**15)]
        assert scaler == {SCALE: torch.tensor(2.0**15), GOOD_STEPS: torch.tensor(1)}
        assert changed and updates == 3
    with Vault(str(tmp_path)).at(5) as checkpoint:
        assert float(checkpoint.read(SCALE, Box.whole(()))) == 2.0**15


def test_a_state_without_a_scale_begins_the_search_anew(pool: RankPool, tmp_path: Path) -> None:
    pool.run(Layout(), _leg, _job(train__precision="fp32"), str(tmp_path), 0, 1)
    ((results, _, _, updates),) = pool.run(Layout(), _leg, _job(), str(tmp_path), 1, 1)
    assert (results[0].skipped, results[0].loss_scale, updates) == (False, 2.0**16, 2)


def _curve(groups: Groups, job: JobConfig, steps: int) -> list[StepResult]:
    engine = engine_of(groups, VLMRecipe(job), job)
    return [step(engine) for _ in range(steps)]


def test_half_precision_follows_the_float32_curve(pool: RankPool) -> None:
    """50 steps: each loss within 2 % of float32's for bf16 (8 bits of mantissa), 1 % for fp16 (11 bits)."""
    curves = {}
    for precision in ("fp32", "bf16", "fp16"):
        job = _job(train__precision=precision, train__steps=50, train__loss_scale={"initial": 2.0**12})
        (results,) = pool.run(Layout(), _curve, job, 50)
        assert not any(r.skipped for r in results)
        curves[precision] = [r.loss for r in results]
    worst = {p: max(abs(a / b - 1) for a, b in zip(curves[p], curves["fp32"], strict=True)) for p in ("bf16", "fp16")}
    print({name: f"{value:.1e}" for name, value in worst.items()}, curves["fp32"][0], curves["fp32"][-1])
    assert 0 < worst["bf16"] < 0.02 and 0 < worst["fp16"] < 0.01
    assert curves["fp32"][-1] < 0.6 * curves["fp32"][0]


def test_a_scale_changes_nothing_but_what_would_vanish(pool: RankPool) -> None:
    """Norms and clipping are those of the unscaled gradient: two scales, the same step but for float16's rounding."""
    found = [
        pool.run(Layout(), _curve, _job(train__loss_scale={"initial": 2.0**power}, optim__clip_norm=0.1), 3)[0]
        for power in (10, 14)
    ]
    for low, high in zip(*found, strict=True):
        assert low.grad_norm == pytest.approx(high.grad_norm, rel=1e-2) and low.grad_norm > 0.1
        assert low.loss == pytest.approx(high.loss, rel=1e-3)
