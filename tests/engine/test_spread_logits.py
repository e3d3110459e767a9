"""Cross-entropy and argmax of logits that are spread over ranks, and sums in buckets, beside plain torch."""

from __future__ import annotations

import pytest
import torch
from tests.support.ranks import RankPool
from torch.nn import functional

from planaria.engine.bucketed import sum_in_place
from planaria.layout import Layout
from planaria.objectives.cross_entropy import spread_argmax, spread_cross_entropy_sum
from planaria.runtime.groups import Groups

IGNORED = -100


def _spread(groups: Groups, spread: float, targets: list[int]) -> tuple[float, float, float]:
    """Relative errors of the loss and of the gradient, and whether argmax agrees."""
    group = groups.mesh.get_group("tp")
    generator = torch.Generator().manual_seed(5)
    whole = (spread * torch.randn(len(targets), 12, generator=generator, dtype=torch.float64)).round(decimals=1)
    whole[0, 3] = whole[0, 11] = whole.max() + 1  # equals on two ranks: the first one counts
    plain = whole.clone().requires_grad_()
    labels = torch.tensor(targets)
    expected = functional.cross_entropy(plain, labels, ignore_index=IGNORED, reduction="sum")
    (3 * expected).backward()
    own = whole.chunk(group.size(), 1)[group.rank()].clone().requires_grad_()
    loss = spread_cross_entropy_sum(own, labels, IGNORED, group)
    (3 * loss).backward()
    assert plain.grad is not None and own.grad is not None
    gradient = (own.grad - plain.grad.chunk(group.size(), 1)[group.rank()]).abs().max()
    agrees = torch.equal(spread_argmax(own.detach(), group), whole.argmax(1))
    return (loss - expected).abs().item() / max(1.0, expected.item()), gradient.item(), float(agrees)


@pytest.mark.parametrize("spread", [1.0, 1e4])
@pytest.mark.parametrize("targets", [[3, 0, IGNORED, 11, 5], [IGNORED, IGNORED]])
def test_logits_spread_over_ranks_are_as_good_as_whole_ones(pool: RankPool, spread: float, targets: list[int]) -> None:
    for loss, gradient, agrees in pool.run(Layout(tp=3), _spread, spread, targets):
        assert loss < 1e-14
        assert gradient < 1e-14
        assert agrees


def _summed(groups: Groups, bucket_bytes: int) -> list[torch.Tensor]:
    rank = groups.rendezvous.rank
    shapes_and_dtypes = [((3, 2), torch.float32), ((), torch.float32), ((5,), torch.float64), ((40,), torch.float32)]
    tensors = [torch.full(shape, rank + index, dtype=dtype) for index, (shape, dtype) in enumerate(shapes_and_dtypes)]
    column = torch.full((4, 2), float(rank))
    sum_in_place([*tensors, column[:, 1]], groups.mesh.get_group("cp"), bucket_bytes)
    return [*tensors, column]


@pytest.mark.parametrize("bucket_bytes", [1, 32, 1 << 20])
def test_sums_do_not_depend_on_buckets(pool: RankPool, bucket_bytes: int) -> None:
    for rank, (a, b, c, d, column) in enumerate(pool.run(Layout(cp=2), _summed, bucket_bytes)):
        assert [t.dtype for t in (a, b, c, d)] == [torch.float32, torch.float32, torch.float64, torch.float32]
        for index, tensor in enumerate((a, b, c, d)):
            assert torch.equal(tensor, torch.full_like(tensor, 1 + 2 * index))
        # A view is summed in place; what is beside it stays.
        assert column[:, 0].eq(rank).all()
        assert column[:, 1].eq(1).all()
