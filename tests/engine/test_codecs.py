"""What each codec loses is within its stated bound, and what is not finite shows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from planaria.engine.reduce.codecs import UNIT_BF16, Bf16, Int8
from planaria.engine.wire import Wire, all_gather_bytes, all_reduce_bytes, all_to_all_bytes

floats = st.floats(-(2.0**100), 2.0**100, width=32)
blocks = st.lists(floats, min_size=1, max_size=600)


def _padded(values: list[float], dtype: torch.dtype) -> Tensor:
    x = torch.zeros(-(-len(values) // Int8.block) * Int8.block, dtype=dtype)
    x[: len(values)] = torch.tensor(values, dtype=dtype)
    return x


@settings(max_examples=60, deadline=None)
@given(blocks, st.sampled_from([torch.float32, torch.float64]))
def test_bf16_rounds_to_eight_bits(values: list[float], dtype: torch.dtype) -> None:
    x = _padded(values, dtype)
    data = Bf16().encode(x)
    assert data.dtype == torch.uint8 and data.numel() == 2 * x.numel()
    error = (Bf16().decode(data, x) - x).abs().double()
    assert (error <= UNIT_BF16 * x.abs().double() + 2.0**-134).all()


@settings(max_examples=60, deadline=None)
@given(blocks, st.sampled_from([torch.float32, torch.float64]))
def test_int8_is_wrong_by_half_a_level_at_most(values: list[float], dtype: torch.dtype) -> None:
    x = _padded(values, dtype)
    data = Int8().encode(x)
    assert data.numel() == x.numel() // 256 * 260
    error = (Int8().decode(data, x) - x).abs().double().view(-1, Int8.block)
    greatest = x.view(-1, Int8.block).abs().amax(1, keepdim=True).double()
    # A scale below the normal range of float32 has few bits: the second term.
    assert (error <= greatest / 254 * (1 + 1e-4) + 127 * 2.0**-149).all()


def test_int8_uses_all_its_levels() -> None:
    x = torch.linspace(-1, 1, 255).repeat(2)[: Int8.block]
    assert len(Int8().decode(Int8().encode(x), x).unique()) == 255


@pytest.mark.parametrize("codec", [Bf16(), Int8()], ids=["bf16", "int8"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_in_its_block_alone(codec: Bf16 | Int8, bad: float) -> None:
    x = torch.ones(2 * Int8.block)
    x[7] = bad
    back = codec.decode(codec.encode(x), x)
    assert not back[: Int8.block].isfinite().all()
    assert back[Int8.block :].isfinite().all()


def test_bytes_are_those_of_the_ring() -> None:
    assert all_reduce_bytes(1200, 1) == all_gather_bytes(100, 1) == all_to_all_bytes(100, 1) == 0
    assert all_reduce_bytes(1200, 2) == 1200 and all_reduce_bytes(1200, 3) == 1600
    # An all-reduce is an all-to-all and an all-gather of pieces.
    assert all_to_all_bytes(400, 3) + all_gather_bytes(400, 3) == all_reduce_bytes(1200, 3)
    wire = Wire()
    wire.add("dp_replicate", 5)
    wire.add("dp_replicate", 6)
    assert (wire.sent("dp_replicate"), wire.sent("tp")) == (11, 0)
