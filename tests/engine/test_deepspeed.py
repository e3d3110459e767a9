"""The DeepSpeed engine: the same steps as plain torch and the native engine, and the same state, to the bit."""

from __future__ import annotations

import gc
import math
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.forms import long_form
from tests.support.hopping import Station, hop, layouts, route
from tests.support.ranks import RankPool
from tests.support.saving import save
from tests.support.vlm import CPU, vlm_job
from torch import Tensor

from planaria.config import ConfigError, JobConfig
from planaria.engine.deepspeed import DeepSpeedEngine
from planaria.engine.facts import model_facts
from planaria.engine.initial import first_state
from planaria.engine.make import make_engine
from planaria.engine.protocol import Engine, StepResult
from planaria.layout import Layout, LayoutError
from planaria.models.choose import job_recipe
from planaria.models.vlm import VLMRecipe
from planaria.parity.measure import Held, assemble, held, relative_errors
from planaria.parity.reference import Reference
from planaria.parity.steps import batches, engine_of, step
from planaria.runtime.groups import Groups
from planaria.state.boxes import Box
from planaria.state.replicas import Comparison
from planaria.state.vault import Vault

STAGES = (0, 1, 2, 3)
SGD: dict[str, Any] = {"optim__name": "sgd", "optim__momentum": 0.9, "optim__lr": 0.05, "optim__weight_decay": 0.1}
# With the usual eps Adam makes of a gradient that is nothing but rounding a step as large as any.
ADAMW: dict[str, Any] = {"optim__weight_decay": 0.1, "optim__eps": 1e-3}
CLIPPED: dict[str, Any] = SGD | {"optim__clip_norm": 0.3}
# DeepSpeed computes in float32, and so does the reference: sums in another order differ by some roundings of 6e-8.
LIMIT = 2e-5


def zero_job(stage: int, *, offload: bool = False, **overrides: Any) -> JobConfig:
    """The usual job of five samples, two of them without a picture, under ZeRO ``stage``."""
    engine = {"name": "deepspeed", "zero_stage": stage} | ({"offload_optimizer": "cpu"} if offload else {})
    return vlm_job(engine=engine, **({"train__precision": "fp32"} | overrides))


def native_job(**overrides: Any) -> JobConfig:
    return vlm_job(**({"train__precision": "fp32"} | overrides))


# Steps


@cache
def _reference(preset: str, clipped: bool) -> tuple[list[float], list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, norms, the first gradients and the last parameters of three steps of plain torch."""
    job = native_job(model={"preset": preset}, **(CLIPPED if clipped else ADAMW))
    reference = Reference(VLMRecipe(job), job)
    plain = reference.optimizer()
    losses, norms, gradients = [], [], {}
    trained = [p for p in reference.model.parameters() if p.requires_grad]
    for number in range(3):
        losses.append(reference.backward())
        if not number:
            gradients = reference.gradients()
        norms.append(torch.nn.utils.clip_grad_norm_(trained, job.optim.clip_norm or math.inf).item())
        plain.step()
        reference.step_done += 1
    return losses, norms, gradients, reference.parameters()


def _train(groups: Groups, job: JobConfig) -> tuple[list[StepResult], Held, Held, Comparison | None]:
    engine = engine_of(groups, VLMRecipe(job), job)
    assert isinstance(engine, DeepSpeedEngine)
    gradients: list[Held] = []

    def keep() -> None:
        gradients.append(held(engine, gradients=True))

    results = [step(engine, on_gradients=keep) for _ in range(3)]
    return results, gradients[0], held(engine, gradients=False), engine.compare_replicas()


def _close(found: Held | list[Held], expected: dict[str, Tensor], limit: float = LIMIT) -> None:
    # A key bias has gradient zero (see test_parity), and what rounding leaves of it depends on the order of sums.
    errors = relative_errors(assemble(found), expected, floor=1e-6)  # type: ignore[arg-type]
    checked = {name: error for name, error in errors.items() if not name.endswith("k_proj.bias")}
    worst = max(checked, key=checked.__getitem__)
    assert checked[worst] < limit, (worst, checked[worst])


def _compare(pool: RankPool, layout: Layout, job: JobConfig) -> None:
    assert job.model is not None and job.model.preset is not None
    losses, norms, gradients, parameters = _reference(job.model.preset, job.optim.name == "sgd")
    answers = pool.run(layout, _train, job)
    for results, _, _, compared in answers:
        assert [r.loss for r in results] == pytest.approx(losses, rel=1e-6)
        assert [r.grad_norm for r in results] == pytest.approx(norms, rel=1e-5)
        assert not any(r.skipped for r in results)
        assert compared is None or not compared.differ
    assert answers[0][3] is not None
    _close([found for _, found, _, _ in answers], gradients)
    _close([found for _, _, found, _ in answers], parameters)


@pytest.mark.parametrize("stage", STAGES)
def test_three_steps_are_those_of_plain_torch(pool: RankPool, stage: int) -> None:
    """Three ranks of which one has fewer samples, several micro-batches, clipping, pictures on some ranks only, an
    embedding that is tied to the head."""
    job = zero_job(stage, model={"preset": "llava-siglip-qwen-tiny"}, train__micro_batch=1, **CLIPPED)
    _compare(pool, Layout(dp_shard=3), job)


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_offloaded_steps_are_those_of_plain_torch(pool: RankPool, stage: int) -> None:
    _compare(pool, Layout(dp_shard=2), zero_job(stage, offload=True, **CLIPPED))


@long_form
@pytest.mark.parametrize("optim", [ADAMW, CLIPPED], ids=["adamw", "sgd"])
@pytest.mark.parametrize("offload", [False, True], ids=["device", "cpu"])
@pytest.mark.parametrize("world", (1, 2, 3, 4))
@pytest.mark.parametrize("stage", STAGES)
def test_steps_on_any_world(pool: RankPool, stage: int, world: int, offload: bool, optim: dict[str, Any]) -> None:
    if offload and not stage:
        pytest.skip("stage 0 has nothing to offload")
    _compare(pool, Layout(dp_shard=world), zero_job(stage, offload=offload, **optim))


def _state(engine: Engine) -> list[Tensor]:
    """Copies of all that this rank holds."""
    return [part.value.clone() for part in engine.state()]


def _poisoned(groups: Groups, job: JobConfig) -> tuple[list[StepResult], list[Tensor], list[Tensor], list[Tensor]]:
    engine = engine_of(groups, VLMRecipe(job), job)
    assert isinstance(engine, DeepSpeedEngine)

    def poison() -> None:
        if dist.get_rank() == 1:
            next(gradient for gradient in engine._partition.gradients() if gradient.numel()).view(-1)[0] = math.inf

    results = [step(engine)]
    before = _state(engine)
    results.append(step(engine, on_gradients=poison))
    after = _state(engine)
    results.append(step(engine))
    return results, before, after, _state(engine)


@pytest.mark.parametrize("stage", (1, 3))
def test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks(pool: RankPool, stage: int) -> None:
    for results, before, after, later in pool.run(Layout(dp_shard=2), _poisoned, zero_job(stage)):
        assert [r.skipped for r in results] == [False, True, False]
        assert results[1].lr == 0.0
        assert all(map(torch.equal, before, after))
        assert math.isfinite(results[2].loss)
        assert not all(map(torch.equal, after, later))


# State


def _leg(groups: Groups, job: JobConfig, source: str, begin: int, target: str, steps: int) -> list[float]:
    """Load the checkpoint of step ``begin`` in ``source`` (or begin afresh), train, save to ``target``."""
    recipe = VLMRecipe(job)
    engine = make_engine(recipe, job, groups.rendezvous.layout, groups.mesh, CPU)
    wanted = engine.wanted()  # as a worker does, to have it fetched from memory: before anything is loaded
    if begin:
        with Vault(source).at(begin) as checkpoint:
            engine.load(checkpoint)
    else:
        engine.load(first_state(recipe, job))
    assert wanted == engine.wanted()
    losses = [step(engine).loss for _ in range(steps)]
    save(engine, Vault(target), f"from-{engine.step_done}-{job.engine.name}")
    return losses


def _contents(folder: Path, step: int) -> dict[str, Tensor]:
    with Vault(folder).at(step) as checkpoint:
        return {n: checkpoint.read(n, Box.whole(checkpoint.global_shape(n))) for n in checkpoint.tensors}


@pytest.mark.parametrize("precision", ("fp32", "bf16"))
def test_state_goes_between_the_engines_to_the_bit(pool: RankPool, tmp_path: Path, precision: str) -> None:
    changed = {"train__precision": precision, "model": {"preset": "llava-tiny", "freeze": ["vision"]}}
    native = native_job(**changed)
    stages = (0, 1, 2, 3) if precision == "fp32" else (2, 3)
    zero = [
        (zero_job(stage, **changed), Layout(dp_shard=world)) for stage, world in zip(stages, (2, 3, 3, 2), strict=False)
    ]
    hops = [(native, Layout(dp_shard=2, tp=2)), *zero, (native, Layout(dp_shard=3))]
    folders = [tmp_path / str(at) for at in range(len(hops))]
    pool.run(hops[0][1], _leg, hops[0][0], "", 0, str(folders[0]), 2)
    expected = _contents(folders[0], 2)
    assert any(name.startswith("optim/exp_avg_sq/") and value.any() for name, value in expected.items())
    for (job, layout), before, folder in zip(hops[1:], folders, folders[1:], strict=False):
        pool.run(layout, _leg, job, str(before), 2, str(folder), 0)
        found = _contents(folder, 2)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items()), (str(layout), job.engine)
        assert all(found[name].dtype == value.dtype for name, value in expected.items())


@long_form
@pytest.mark.parametrize("part", range(4))
def test_twenty_pairs_of_engines_and_layouts(pool: RankPool, tmp_path: Path, part: int) -> None:
    """Every box that a rank has loaded is, bit for bit, what the other engine or layout has left."""
    zero = [
        Station(Layout(dp_shard=world), {"engine": {"name": "deepspeed", "zero_stage": stage}})
        for stage in STAGES
        for world in (1, 2, 3, 4, 5)
    ]
    native = [Station(layout) for layout in layouts(most_ranks=8, batch=5)]
    half = [route(7 + part, stops, 3) for stops in (native, zero)]
    stations = [station for pair in zip(*half, strict=True) for station in pair]
    job = native_job(optim__lr=3e-3)
    still = hop(pool, job, [Station(Layout())], tmp_path / "still", len(stations))
    print(" -> ".join(map(str, stations)))
    assert hop(pool, job, stations, tmp_path / "moved", 1) == pytest.approx(still, rel=1e-5)


def test_losses_are_those_of_one_engine(pool: RankPool, tmp_path: Path) -> None:
    common: dict[str, Any] = {"optim__lr": 3e-3, "optim__clip_norm": 0.5}
    native = native_job(**common)
    still = pool.run(Layout(), _leg, native, "", 0, str(tmp_path / "still"), 6)[0]
    hops = [
        (zero_job(3, **common), Layout(dp_shard=2)),
        (native, Layout(tp=2)),
        (zero_job(1, **common), Layout(dp_shard=3)),
    ]
    losses: list[float] = []
    for job, layout in hops:
        folder = str(tmp_path / "moved")
        losses += pool.run(layout, _leg, job, folder, len(losses), folder, 2)[0]
    assert losses == pytest.approx(still, rel=1e-5)


def test_bf16_follows_the_fp32_curve(pool: RankPool) -> None:
    """Rounding to 8 bits of mantissa moves each loss by less than 2 % while the loss falls by far more."""
    common: dict[str, Any] = {"train__global_batch": 4, "optim__lr": 5e-3}
    plain = pool.run(Layout(dp_shard=2), _losses, zero_job(2, **common), 8)[0]
    for stage in (2, 3):
        found = pool.run(Layout(dp_shard=2), _losses, zero_job(stage, train__precision="bf16", **common), 8)[0]
        assert found == pytest.approx(plain, rel=0.02)
        assert found != plain
    assert plain[-1] < 0.85 * plain[0]


def _losses(groups: Groups, job: JobConfig, steps: int) -> list[float]:
    engine = engine_of(groups, VLMRecipe(job), job)
    return [step(engine).loss for _ in range(steps)]


def _scores(groups: Groups, job: JobConfig) -> tuple[Tensor, float]:
    recipe, layout = VLMRecipe(job), groups.rendezvous.layout
    engine = engine_of(groups, recipe, job)
    batch = batches(recipe, job, 0, layout.dp_rank(groups.rendezvous.rank), layout.dp)[0]
    return engine.score(batch), step(engine).loss


def test_scores_are_those_of_the_native_engine(pool: RankPool) -> None:
    layout = Layout(dp_shard=2)
    for (native, loss), (zero, same) in zip(
        pool.run(layout, _scores, native_job()), pool.run(layout, _scores, zero_job(3)), strict=True
    ):
        assert torch.equal(native, zero)
        assert same == pytest.approx(loss, rel=1e-6)


# Generations


def _left(groups: Groups) -> tuple[int, int]:
    """Engines of DeepSpeed and parameters that outlived their generation."""
    gc.collect()
    kinds = [type(item) for item in gc.get_objects()]
    return sum(kind.__name__ == "DeepSpeedEngine" for kind in kinds), kinds.count(torch.nn.Parameter)


def _stuck(groups: Groups, job: JobConfig) -> float:
    """Rank 1 never comes to the second step; seconds that rank 0 waits there for it after the abort."""
    engine = engine_of(groups, VLMRecipe(job), job)
    step(engine)
    if dist.get_rank() == 1:
        time.sleep(2.0)  # it lives: what ends the wait is the abort alone
        return 0.0
    aborted: list[float] = []

    def abort() -> None:
        aborted.append(time.monotonic())
        groups.interrupt()

    threading.Timer(0.5, abort).start()
    with pytest.raises(RuntimeError):
        step(engine)
    return time.monotonic() - aborted[0]


@pytest.mark.parametrize("stage", (pytest.param(1, marks=long_form), 3))
def test_processes_live_through_broken_generations(pool: RankPool, stage: int) -> None:
    job, layout = zero_job(stage), Layout(dp_shard=2)
    expected = pool.run(layout, _losses, job, 2)
    before = pool.run(layout, _left)
    for world in (1, 2):  # the processes differ in what they have been through
        pool.run(Layout(dp_shard=world), _losses, job, 1)
    assert max(pool.run(layout, _stuck, job)) < 1.0
    assert pool.run(layout, _losses, job, 2) == expected
    assert pool.run(layout, _left) == before
    assert {engines for engines, _ in before} == {0}


# What it does not run


def _refused(groups: Groups, job: JobConfig) -> str:
    try:
        make_engine(VLMRecipe(job), job, groups.rendezvous.layout, groups.mesh, CPU)
    except LayoutError as error:
        return str(error)
    return ""


def test_dual_encoders_are_refused_before_anything_starts() -> None:
    job = zero_job(2, model={"preset": "clip-tiny"}, data__scenes={"caption_fraction": 1.0})
    with pytest.raises(ConfigError, match=r"no pairs of other ranks.*set engine.name=native"):
        model_facts(job_recipe(job), job)


def test_a_layout_that_it_cannot_run_is_refused(pool: RankPool) -> None:
    for layout in (Layout(tp=2), Layout(dp_replicate=2)):
        for found in pool.run(layout, _refused, zero_job(2)):
            assert "engine.name: native" in found and str(layout) in found
