"""Compressed gradients between replicas: bounds, feedback that loses nothing, bytes that are really fewer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.forms import long_form
from tests.support.ranks import RankPool
from tests.support.saving import save
from tests.support.toy import ToyRecipe
from tests.support.vlm import Held, assemble, engine_of, held, relative_errors, step
from torch import Tensor

from planaria.config import JobConfig, parse
from planaria.engine.reduce.codecs import UNIT_BF16, Bf16, Codec, Int8
from planaria.engine.reduce.exchange import sum_encoded
from planaria.engine.reduce.feedback import error_name
from planaria.engine.wire import Wire
from planaria.layout import Layout
from planaria.runtime.groups import Groups
from planaria.state.boxes import Box
from planaria.state.vault import Vault

FAR = "dp_replicate"
RECIPE = ToyRecipe(width=32, samples=24)


def job(compression: str = "none", **more: Any) -> JobConfig:
    communication = {"compression": compression, "powersgd_rank": 2, "bucket_mb": 0.02} | more.pop("communication", {})
    tree: dict[str, Any] = {
        "train": {"steps": 40, "global_batch": 12, "micro_batch": 2, "precision": "fp64"},
        "optim": {"name": "adamw", "lr": 5e-3, "schedule": {"kind": "constant"}},
        "communication": communication,
    }
    for key, section in more.items():
        tree[key] = tree.get(key, {}) | section
    return parse(tree)


# The sum of encoded pieces


def _numbers(rank: int, length: int) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def _summed(groups: Groups, codec: Codec, length: int) -> tuple[Tensor, Tensor, int]:
    wire = Wire()
    flat = _numbers(dist.get_rank(), length)
    (total,) = sum_encoded([flat], codec, groups.mesh.get_group(FAR), wire, feedback=True)
    return total, flat, wire.sent(FAR)


@pytest.mark.parametrize("codec", [Bf16(), Int8()], ids=["bf16", "int8"])
@pytest.mark.parametrize("replicas", [2, 3])
def test_an_encoded_sum_and_what_is_left_of_it_are_the_sum(pool: RankPool, codec: Codec, replicas: int) -> None:
    length = 4 * 256 * replicas
    answers = pool.run(Layout(dp_replicate=replicas), _summed, codec, length)
    given = [_numbers(rank, length) for rank in range(replicas)]
    exact, found = torch.stack(given).sum(0), answers[0][0]
    assert all(torch.equal(total, found) for total, _, _ in answers)
    left = torch.stack([flat for _, flat, _ in answers]).sum(0)
    torch.testing.assert_close(found + left, exact, rtol=0, atol=1e-13)
    sizes = torch.stack(given).abs()
    if isinstance(codec, Bf16):
        bound = (2 * UNIT_BF16 + UNIT_BF16**2) * sizes.sum(0)
    else:  # each term, and the sum once more, by half a level of its block
        level = sizes.view(replicas, -1, 256).amax(2, keepdim=True).sum(0) / 254
        bound = (2 * level * (1 + 1 / 254)).expand(-1, 256).reshape(-1)
    assert ((found - exact).abs() <= bound * (1 + 1e-6)).all()
    assert (found - exact).abs().max() > 1e-4  # something is lost in one go, and fed back
    encoded = codec.encode(given[0]).numel()
    assert all(sent == 2 * (replicas - 1) * encoded // replicas for _, _, sent in answers)


# Steps of an engine


def _train(groups: Groups, job: JobConfig, steps: int) -> tuple[list[float], Held, int, bool]:
    engine = engine_of(groups, RECIPE, job)
    losses = [step(engine).loss for _ in range(steps)]
    found = engine.compare_replicas()
    return losses, held(engine, gradients=False), engine.wire.sent(FAR), found is None or not found.differ


# Largest share of the uncompressed bytes on the wire of this small model: 2 of 8; 260 of 2048, and the padding of small
# tensors to blocks of 256; factors of rank 2 for matrices of 32 columns, and small tensors as they are.
SHARES = {"bf16": 0.251, "int8": 0.23, "powersgd": 0.25}
BOUNDS = {"bf16": 0.005, "int8": 0.02, "powersgd": 0.15}
"""Largest distance of a loss from the uncompressed one, as a share of the first loss."""


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        (Layout(dp_replicate=2, dp_shard=2), tuple(SHARES)),
        pytest.param(Layout(dp_replicate=2, tp=2), ("int8",), marks=long_form),
    ],
    ids=["dp_replicate2xdp_shard2", "dp_replicate2xtp2"],
)
def test_thirty_compressed_steps_follow_the_uncompressed_curve(
    pool: RankPool, layout: Layout, names: tuple[str, ...]
) -> None:
    """Every loss is within :data:`BOUNDS` of the first one, while the curve falls by far more."""
    plain, *_ = pool.run(layout, _train, job(), 30)
    curve, sent = plain[0], plain[2]
    print(layout, [round(x, 3) for x in curve[::5]], sent)
    assert curve[-1] < 0.8 * curve[0]
    for name in names:
        share = SHARES[name]
        answers = pool.run(layout, _train, job(name), 30)
        assert all(same for *_, same in answers), name  # replicas, bit by bit
        assemble(part for _, part, _, _ in answers)
        losses = answers[0][0]
        worst = max(abs(a - b) for a, b in zip(losses, curve, strict=True)) / curve[0]
        print(name, f"{worst:.4f} of the first loss, {answers[0][2] / sent:.4f} of the bytes")
        assert losses == pytest.approx(curve, abs=BOUNDS[name] * curve[0]), name
        assert losses != curve
        assert 0 < answers[0][2] <= share * sent, (name, answers[0][2] / sent)


def _applied(groups: Groups, job: JobConfig, steps: int) -> tuple[list[Held], Held]:
    """(gradients that were applied in each step, errors that are left) while parameters and batch stay the same."""
    engine = engine_of(groups, RECIPE, job)
    taken: list[Held] = []
    for _ in range(steps):
        engine.step_done = 0
        step(engine, on_gradients=lambda: taken.append(held(engine, gradients=True)))
    errors = [(h.tensor, h.global_shape, h.box, h.value.clone()) for h in engine.state() if "error" in h.tensor]
    return taken, errors


@pytest.mark.parametrize(("name", "steps"), [("int8", 8), ("powersgd", 24)])
def test_the_mean_of_compressed_gradients_tends_to_the_true_one(pool: RankPool, name: str, steps: int) -> None:
    layout = Layout(dp_replicate=2, dp_shard=2)
    still: dict[str, Any] = {"optim": {"lr": 1e-290, "weight_decay": 0.0, "clip_norm": None}}
    true = assemble(taken[0] for taken, _ in pool.run(layout, _applied, job(**still), 1))
    answers = pool.run(layout, _applied, job(name, **still), steps)
    applied = [assemble(taken[at] for taken, _ in answers) for at in range(steps)]
    errors = assemble(left for _, left in answers)

    def off(count: int) -> float:
        means = {key: torch.stack([one[key] for one in applied[:count]]).mean(0) for key in true}
        return float(torch.stack([(means[key] - true[key]).square().sum() for key in true]).sum().sqrt())

    # Error feedback: the mean is wrong by what is left, over the number of steps.
    for key, gradient in true.items():
        left = errors[error_name(0, key)] + errors[error_name(1, key)]
        total = torch.stack([one[key] for one in applied]).sum(0)
        torch.testing.assert_close(total + left, steps * gradient, rtol=1e-9, atol=1e-12)
    assert off(steps) < 0.25 * off(1), (off(steps), off(1))


def _skipped(groups: Groups, job: JobConfig) -> tuple[Any, Any, Any]:
    engine = engine_of(groups, RECIPE, job)

    def memory() -> dict[str, Tensor]:
        return {h.tensor: h.value.clone() for h in engine.state() if h.tensor.startswith("sync/")}

    step(engine)
    before = memory()
    if dist.get_rank() == 1:
        engine.model.register_forward_pre_hook(lambda module, args: (args[0] * torch.nan,))
    result = step(engine)
    return result, before, memory()


@pytest.mark.parametrize("name", ["int8", "powersgd"])
def test_a_skipped_step_leaves_the_feedback_as_it_was(pool: RankPool, name: str) -> None:
    for result, before, after in pool.run(Layout(dp_replicate=2), _skipped, job(name)):
        assert result.skipped
        assert before.keys() == after.keys() and before
        assert all(torch.equal(after[key], value) for key, value in before.items())
        assert any(value.any() for value in before.values())


# Feedback is state


def _leg(
    groups: Groups, job: JobConfig, folder: str, begin: int, steps: int, keep: bool
) -> tuple[Held, dict[str, Any]]:
    """Load the checkpoint of ``begin`` (or start afresh), train, save: (parameters, own feedback after loading)."""
    engine = engine_of(groups, RECIPE, job)
    vault = Vault(folder)
    if begin:
        with vault.at(begin) as checkpoint:
            assert {name for name, _ in engine.wanted() if name.startswith("model/")} <= set(checkpoint.tensors)
            engine.load(checkpoint)
    loaded = {h.tensor: (h.box, h.value.clone()) for h in engine.state() if h.tensor.startswith("sync/")}
    for _ in range(steps):
        step(engine)
    if keep:
        save(engine, vault, "token")
    return held(engine, gradients=False), loaded


@pytest.mark.parametrize("name", ["int8", "powersgd"])
def test_feedback_goes_to_any_layout(pool: RankPool, tmp_path: Path, name: str) -> None:
    first, config = Layout(dp_replicate=2, dp_shard=2), job(name)
    folder = str(tmp_path)
    undisturbed = assemble(part for part, _ in pool.run(first, _leg, config, folder, 0, 4, False))
    pool.run(first, _leg, config, folder, 0, 2, True)
    with Vault(tmp_path).at(2) as checkpoint:
        stored = {key: checkpoint.read(key) for key in checkpoint.tensors if key.startswith("sync/")}
    parameters = list(undisturbed)
    assert {error_name(replica, key) for replica in range(2) for key in parameters} <= stored.keys()
    assert any(stored[error_name(1, key)].any() for key in parameters)
    # The same layout goes on as if nothing had been.
    again = pool.run(first, _leg, config, folder, 2, 2, False)
    found = assemble(part for part, _ in again)
    assert all(torch.equal(found[key], undisturbed[key]) for key in parameters)
    # Other layouts hold the same tensors, to the bit; another number of replicas holds the same sum.
    for layout in (Layout(dp_replicate=2, tp=2), Layout(dp_replicate=3), Layout(dp_shard=3)):
        answers = pool.run(layout, _leg, config, folder, 2, 0, False)
        sums = {key: torch.zeros_like(stored[error_name(0, key)]) for key in parameters}
        seen: set[tuple[str, Box]] = set()
        for _, loaded in answers:
            for tensor, (box, value) in loaded.items():
                if tensor in stored and (layout.dp_replicate == 2 or "error" not in tensor):
                    assert torch.equal(value, stored[tensor][box.relative_to(Box.whole(stored[tensor].shape))])
                if "error" in tensor and (tensor, box) not in seen:
                    seen.add((tensor, box))
                    part = sums[tensor.partition("/")[2].partition("/")[2]]
                    part[box.relative_to(Box.whole(part.shape))] += value
        for key, total in sums.items():
            torch.testing.assert_close(total, stored[error_name(0, key)] + stored[error_name(1, key)])


def test_a_checkpoint_without_feedback_is_taken_up(pool: RankPool, tmp_path: Path) -> None:
    layout = Layout(dp_replicate=2)
    pool.run(layout, _leg, job(), str(tmp_path), 0, 1, True)
    for name in ("int8", "powersgd"):
        for _, loaded in pool.run(layout, _leg, job(name), str(tmp_path), 1, 1, False):
            assert not any(value.any() for tensor, (_, value) in loaded.items() if "error" in tensor)


# One reduction per step


def _gradients(groups: Groups, job: JobConfig) -> Held:
    engine = engine_of(groups, RECIPE, job)
    taken: list[Held] = []
    step(engine, on_gradients=lambda: taken.append(held(engine, gradients=True)))
    return taken[0]


@pytest.mark.parametrize("layout", [Layout(dp_shard=2), Layout(dp_replicate=2, dp_shard=2)], ids=str)
def test_gradients_that_are_kept_whole_are_the_same(pool: RankPool, layout: Layout) -> None:
    small: dict[str, Any] = {"train": {"micro_batch": 1}}
    expected = assemble(pool.run(layout, _gradients, job(**small, communication={"prefetch": False})))
    found = assemble(pool.run(layout, _gradients, job(**small, communication={"accumulate": "whole"})))
    assert max(relative_errors(found, expected).values()) < 1e-12
