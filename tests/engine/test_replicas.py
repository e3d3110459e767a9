"""Data-parallel replicas are compared to the bit, and the one that differs is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.ranks import RankPool
from tests.support.toy import ToyRecipe
from tests.support.vlm import engine_of, step

from planaria.config import parse
from planaria.engine import replicas
from planaria.engine.replicas import INTEGERS, bit_sums, exact_digest
from planaria.layout import Layout
from planaria.runtime.groups import Groups
from planaria.state.replicas import Comparison

JOB = parse({"train": {"steps": 9, "global_batch": 6, "micro_batch": 2}})
FLIPPED = "layers.1.mlp.fc1.weight"


Told = Comparison | None


def _compare(groups: Groups, victim: int | None, on_device: bool = False) -> tuple[Told, Told]:
    """What this rank tells after two steps, and again after one bit of one parameter of ``victim`` flipped."""
    engine = engine_of(groups, ToyRecipe(), JOB)
    if on_device:  # the checksum of the GPUs, which works on any device
        replicas.exact_digest = bit_sums  # type: ignore[assignment]
    try:
        for _ in range(2):
            step(engine)
        before = engine.compare_replicas()
        if groups.rendezvous.rank == victim:
            (tensor,) = [shard.local() for shard in engine.shards if shard.name == FLIPPED]
            tensor.view(torch.int32)[-1, 0] ^= 1  # the least bit of the mantissa
        step(engine)  # the sums of gradients are the same again, and the difference stays
        return before, engine.compare_replicas()
    finally:
        replicas.exact_digest = exact_digest


@pytest.mark.parametrize("on_device", [False, True], ids=["bytes", "sums"])
@pytest.mark.parametrize(
    ("layout", "victim", "ranks"),
    [
        (Layout(dp_replicate=3), 2, (0, 1, 2)),
        (Layout(dp_replicate=3), 0, (0, 1, 2)),
        (Layout(dp_replicate=4), 1, (0, 1, 2, 3)),
        (Layout(dp_replicate=3, dp_shard=2), 3, (1, 3, 5)),
        (Layout(dp_replicate=3, tp=2), 2, (0, 2, 4)),
    ],
    ids=str,
)
def test_the_replica_with_a_flipped_bit_is_named(
    pool: RankPool, layout: Layout, victim: int, ranks: tuple[int, ...], on_device: bool
) -> None:
    answers = pool.run(layout, _compare, victim, on_device)
    told = [answer for answer in answers if answer[0] is not None]
    assert len(told) == layout.world // layout.dp_replicate, "one rank speaks for each group of replicas"
    for before, after in told:
        assert before.differ == ()
        assert before.groups == 3 and len(before.ranks) == layout.dp_replicate
        if after.ranks == ranks:
            (difference,) = after.differ
            assert (difference.group, difference.odd) == ("layers.1", (victim,))
            odd = difference.digests[ranks.index(victim)]
            assert difference.digests.count(odd) == 1 and len(set(difference.digests)) == 2
        else:
            assert after.differ == ()
    assert ranks in [after.ranks for _, after in told]


def test_of_two_replicas_that_differ_none_is_accused(pool: RankPool) -> None:
    after = pool.run(Layout(dp_replicate=2), _compare, 1)[0][1]
    assert [(difference.group, difference.odd) for difference in after.differ] == [("layers.1", ())]


@pytest.mark.parametrize("layout", [Layout(), Layout(dp_shard=3), Layout(tp=2)], ids=str)
def test_where_nothing_is_replicated_that_is_said_once(pool: RankPool, layout: Layout) -> None:
    answers = pool.run(layout, _compare, None)
    assert answers[0] == (Comparison((), 0, ()),) * 2
    assert answers[1:] == [(None, None)] * (layout.world - 1)


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8]


@given(st.sampled_from(DTYPES), st.integers(1, 40), st.integers(0, 10**6), st.data())
def test_no_single_bit_flips_unseen(dtype: torch.dtype, count: int, seed: int, data: Any) -> None:
    integer = INTEGERS[dtype.itemsize]
    bits = torch.randint(-100, 100, (count,), generator=torch.Generator().manual_seed(seed)).to(integer)
    other = bits.clone()
    at, bit = data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, 8 * dtype.itemsize - 1))
    width = 8 * dtype.itemsize
    mask = (1 << bit) - (1 << width if bit == width - 1 else 0)  # as a signed integer
    other[at] ^= mask
    rest = torch.ones(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "CHUNK", 16)  # so that several chunks are mixed
        for digest in (exact_digest, bit_sums):
            first, again, flipped = (digest([words.view(dtype), rest]) for words in (bits, bits.clone(), other))
            assert first == again != flipped
            assert first.dtype == torch.int64 and first.shape == ()


def test_words_that_change_places_are_seen() -> None:
    a = torch.arange(5.0)
    b = a[[0, 2, 1, 3, 4]]
    assert bit_sums([a]) != bit_sums([b])
    assert bit_sums([a[:2], a[2:]]) != bit_sums([a[2:], a[:2]])


def test_empty_shards_have_a_digest() -> None:
    empty = torch.empty(0, 3)
    assert bit_sums([empty]) == 0
    assert exact_digest([empty, torch.ones(2)]) == exact_digest([torch.ones(2)])
