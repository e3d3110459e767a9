"""The whole way with real ranks: steps, snapshots, a lost node, another layout, and a checkpoint beside it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.forms import long_form
from tests.support.memory import Nodes, until
from tests.support.ranks import RankPool
from tests.support.vlm import batches, engine_of, total_targets, vlm_job
from torch import Tensor

from planaria.config import JobConfig
from planaria.layout import Layout
from planaria.memory.client import newest_in_memory
from planaria.memory.drain import pieces
from planaria.memory.recall import MemorySource, MemoryState
from planaria.memory.shelf import Stack
from planaria.memory.snapshots import Snapshots
from planaria.memory.wire import KeeperAddress, KeeperLink
from planaria.models.vlm import VLMRecipe
from planaria.runtime.groups import Groups
from planaria.runtime.keeping import Keeping, describe
from planaria.state.boxes import Box
from planaria.state.vault import Vault

Whole = dict[str, Tensor]
State = list[tuple[str, tuple[int, ...], Box, Tensor]]


def _leg(
    groups: Groups,
    job: JobConfig,
    keepers: dict[str, KeeperAddress],
    nodes: tuple[str, ...],
    source: MemorySource | None,
    upto: int,
) -> tuple[list[float], State, list[dict[str, Any]]]:
    """Train to step ``upto`` from ``source``, as a worker does; (losses, the state at the end, what was told)."""
    rank, layout = groups.rendezvous.rank, groups.rendezvous.layout
    recipe = VLMRecipe(job)
    engine = engine_of(groups, recipe, job)
    if source is not None:
        engine.load(MemoryState(source, nodes[rank], rank, engine.wanted()))
    told: list[dict[str, Any]] = []
    table = describe(engine, rank, nodes)
    generation = groups.rendezvous.generation
    link = KeeperLink(keepers[nodes[rank]])
    snapshots = Snapshots(link, generation, f"w{rank}", table, torch.device("cpu"), True)
    keeping = Keeping(snapshots, table, engine, job, f"run-{generation}", None, told.append, lambda: groups.aborted)
    losses = []
    while engine.step_done < upto:
        share = batches(recipe, job, engine.step_done, layout.dp_rank(rank), layout.dp)
        result = engine.train_step(share, total_targets(recipe, job, engine.step_done), keeping.poll)
        keeping.after_step(result.votes)
        losses.append(result.loss)
    keeping.snapshot()
    snapshots.wait_ready(20.0, lambda: False)
    keeping.close()
    state = [(held.tensor, held.global_shape, held.box, held.value.detach().clone()) for held in engine.state()]
    return losses, state, told


def _assemble(states: list[State]) -> Whole:
    """Global tensors; replicas must agree bit for bit."""
    whole: Whole = {}
    for name, shape, box, value in (item for state in states for item in state):
        target = whole.setdefault(name, torch.full(shape, -1, dtype=value.dtype))
        target[box.relative_to(Box.whole(shape))] = value
    return whole


@pytest.fixture(scope="module")
def pool() -> Any:
    with RankPool(4) as ranks:
        yield ranks


@pytest.mark.parametrize(
    ("before", "places", "after"),
    [
        pytest.param(Layout(dp_shard=3), ("n0", "n1", "n2"), Layout(dp_shard=2), marks=long_form),
        (Layout(dp_shard=2, tp=2), ("n0", "n0", "n1", "n1"), Layout(tp=2)),
        (Layout(dp_replicate=2, dp_shard=2), ("n1", "n2", "n0", "n1"), Layout(dp_shard=3)),
        pytest.param(Layout(dp_replicate=3), ("n0", "n0", "n1"), Layout(dp_replicate=2), marks=long_form),
    ],
    ids=str,
)
def test_a_lost_node_costs_no_step_and_no_bit(
    pool: RankPool, tmp_path: Path, before: Layout, places: tuple[str, ...], after: Layout
) -> None:
    job = vlm_job(checkpoint__every=2)
    vault = Vault(tmp_path)
    shards: dict[int, list[Any]] = {}

    def drain(stack: Stack, buffer: int, message: dict[str, Any]) -> None:
        writer = vault.writer(message["step"], "t")
        shards[message["writer"]] = writer.write_shard(message["writer"], pieces(stack, buffer))

    with Nodes() as nodes:
        nodes.add("n0", "n1", "n2", drain=drain)
        keepers = {address.node: address for address in nodes.addresses}
        answers = pool.run(before, _leg, job, keepers, places, None, 3)
        expected = _assemble([state for _, state, _ in answers])

        # The checkpoint of step 2, written from memory while step 3 was made.
        assert [m["step"] for _, _, told in answers for m in told if m["t"] == "draining"] == [2] * before.world
        until(lambda: len(shards) == before.world, "all shards")
        slices = [item for items in shards.values() for item in items]
        vault.writer(2, "t").commit(slices, {}, expected={name: tuple(t.shape) for name, t in expected.items()})
        assert [info.intact for info in vault.list("deep")] == [True]

        nodes.drop("n1")
        source = newest_in_memory(nodes.addresses)
        assert source is not None
        assert source.step == 3
        living = tuple("n0" if rank % 2 else "n2" for rank in range(after.world))
        nodes.announce()
        restored = pool.run(after, _leg, job, keepers, living, source, 3)
        found = _assemble([state for _, state, _ in restored])
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)

        source = newest_in_memory(nodes.addresses)
        assert source is not None
        assert source.generation == pool._generation, "a snapshot of the same step in the new generation"
        onward = pool.run(after, _leg, job, keepers, living, source, 5)
        still = pool.run(before, _leg, job, keepers | {"n1": keepers["n0"]}, ("n0",) * before.world, None, 5)
        for now, then in zip(onward[0][0], still[0][0][3:], strict=True):
            assert math.isclose(now, then, rel_tol=1e-9)
    assert set(nodes.kinds()) <= {"unreplicated"}


def test_flat_ranges_come_back_from_memory_under_either_engine(pool: RankPool) -> None:
    """Ranges of ZeRO are several boxes of one tensor on a rank; frozen values are kept beside a module in bf16."""
    changed = {"train__precision": "bf16", "model": {"preset": "llava-tiny", "freeze": ["vision"]}}
    second, third = ({"name": "deepspeed", "zero_stage": stage} for stage in (2, 3))
    with Nodes() as nodes:
        nodes.add("n0", "n1", "n2")
        keepers = {address.node: address for address in nodes.addresses}
        before = vlm_job(engine=third, **changed)
        answers = pool.run(Layout(dp_shard=3), _leg, before, keepers, ("n0", "n1", "n2"), None, 2)
        expected = _assemble([state for _, state, _ in answers])
        names = [[name for name, *_ in state] for _, state, _ in answers]
        assert any(len(set(held)) < len(held) for held in names), "no tensor of several boxes"
        nodes.drop("n1")
        nodes.announce()
        for job in (vlm_job(engine=second, **changed), vlm_job(**changed)):
            source = newest_in_memory(nodes.addresses)
            assert source is not None
            assert source.step == 2
            restored = pool.run(Layout(dp_shard=2), _leg, job, keepers, ("n2", "n0"), source, 2)
            found = _assemble([state for _, state, _ in restored])
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)
