from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.pictures import pairs, write_shard

from planaria.commands.data_audit import course_of
from planaria.commands.failures import UsageError
from planaria.config import DataConfig
from planaria.data.errors import DataError
from planaria.data.identity import identity_of
from planaria.data.mixing import Draw, parts_of
from planaria.data.order import indices
from planaria.data.ordering import Order, SourceShape, order_of, quality
from planaria.data.source import open_dataset

shards = st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(any).map(tuple)


@settings(max_examples=30, deadline=None)
@given(shards=shards, block=st.integers(1, 5), seed=st.integers(0, 99), epoch=st.integers(0, 50))
def test_every_epoch_of_blocks_is_a_permutation(shards: tuple[int, ...], block: int, seed: int, epoch: int) -> None:
    order, n = Order([SourceShape(shards)], seed, True, block), sum(shards)
    assert sorted(order.indices(epoch * n, (epoch + 1) * n)) == list(range(n))


@settings(max_examples=15, deadline=None)
@given(
    sources=st.lists(st.tuples(shards, st.integers(1, 9)), min_size=1, max_size=4),
    block=st.none() | st.integers(1, 4),
    cuts=st.lists(st.integers(0, 100), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
def test_any_position_can_be_read_without_what_lies_before(
    sources: list[tuple[tuple[int, ...], int]], block: int | None, cuts: list[int], seed: int
) -> None:
    shapes = [SourceShape(sizes, f"s{i}", weight) for i, (sizes, weight) in enumerate(sources)]
    edges = [0, *sorted(cuts), 100]
    parts = [Order(shapes, seed, True, block).indices(a, b) for a, b in itertools.pairwise(edges)]
    whole = Order(shapes, seed, True, block).indices(0, 100)
    assert list(itertools.chain.from_iterable(parts)) == whole
    # Each source by itself goes through its samples epoch by epoch.
    low = 0
    for shape in shapes:
        mine = [index for index in whole if low <= index < low + shape.samples]
        for start in range(0, len(mine) - shape.samples + 1, shape.samples):
            assert len(set(mine[start : start + shape.samples])) == shape.samples
        low += shape.samples


@settings(max_examples=30, deadline=None)
@given(parts=st.lists(st.integers(1, 40), min_size=1, max_size=7).map(tuple))
def test_shares_are_exact_at_every_moment(parts: tuple[int, ...]) -> None:
    draw, total = Draw(parts), sum(parts)
    for position in range(2 * total + 1):
        for count, part in zip(draw.counts(position), parts, strict=True):
            assert abs(count * total - position * part) < total
    assert draw.counts(10**12 * total) == [10**12 * part for part in parts]


def test_weights_are_read_as_decimals() -> None:
    assert parts_of([0.7, 0.2, 0.1]) == (7, 2, 1) and parts_of([3, 3]) == (1, 1)
    with pytest.raises(ValueError, match="fewer digits"):
        parts_of([0.123456789, 1])
    with pytest.raises(ValueError, match="positive"):
        parts_of([1, 0])


def test_one_source_without_blocks_keeps_its_order() -> None:
    order = Order([SourceShape((400, 600))], 42, True)
    assert order.indices(0, 50) == indices(0, 50, 1000, 42, True)


def test_substitutes_come_from_the_same_source() -> None:
    order = Order([SourceShape((5,), "a"), SourceShape((500,), "b", 3)], 1, True)
    for position in range(40):
        first = order.substitute(position, 0)
        assert all((order.substitute(position, attempt) < 5) == (first < 5) for attempt in range(1, 6))


def test_blocks_trade_a_little_mixing_for_few_open_shards() -> None:
    sizes = (100,) * 40
    measured = {
        block: quality(Order([SourceShape(sizes)], 3, True, block).indices(0, 4000), sizes, 200)
        for block in (None, 10, 1)
    }
    assert abs(measured[None].displacement - 1 / 3) < 0.02 and abs(measured[None].correlation) < 0.05
    assert measured[None].shards > 35 and measured[10].shards <= 20 and measured[1].shards <= 3
    assert abs(measured[10].displacement - 1 / 3) < 0.06
    assert abs(measured[10].correlation) < measured[1].correlation
    plain = quality(range(4000), sizes, 200)
    assert plain.displacement == 0 and plain.correlation > 0.999 and plain.shards == 2


def test_a_mixture_of_files_is_one_data_set(tmp_path: Path) -> None:
    for name, count in (("a", 3), ("b", 5)):
        write_shard(tmp_path / f"{name}.tar", pairs(count, name))
    mixture = [{"name": n, "path": str(tmp_path / f"{n}.tar"), "weight": w} for n, w in (("a", 1), ("b", 3))]
    dataset = open_dataset(DataConfig.model_validate({"source": "files", "mixture": mixture}), "train", 32, 0)
    assert Counter(dataset[index].key.split("/")[0] for index in range(len(dataset))) == {"a.tar": 3, "b.tar": 5}
    assert identity_of(dataset).samples == 8 and len(identity_of(dataset).shards) == 2
    with pytest.raises(IndexError):
        dataset[8]
    mixture[0]["weight"] = 0.123456789
    with pytest.raises(DataError, match="fewer digits"):
        open_dataset(DataConfig.model_validate({"source": "files", "mixture": mixture}), "train", 32, 0)


def test_the_audit_of_a_mixture_knows_its_order(tmp_path: Path) -> None:
    for name, count in (("a", 3), ("b", 5), ("c", 4)):
        write_shard(tmp_path / f"{name}.tar", pairs(count, name))
    mixture = [
        {"name": "one", "path": str(tmp_path / "a.tar"), "weight": 1},
        {"name": "two", "path": str(tmp_path / "[bc].tar"), "weight": 3},
    ]
    data = {"source": "files", "mixture": mixture, "shuffle_block": 1}
    config = DataConfig.model_validate(data)
    dataset = open_dataset(config, "train", 32, 0)
    tree = {"seed": 7, "data": config.model_dump(mode="json"), "train": {"global_batch": 6}}
    (tmp_path / "job.json").write_text(json.dumps(tree))
    (tmp_path / "environment.json").write_text(json.dumps({"data": identity_of(dataset).as_tree()}))
    course, order = course_of(tmp_path, None), order_of(dataset, 7, True, 1)
    assert course.expected(3) == order.indices(18, 24)
    assert [len(shape.shards) for shape in course.shapes] == [1, 2]
    (tmp_path / "environment.json").write_text(json.dumps({"data": {"samples": 12, "digest": "", "shards": []}}))
    with pytest.raises(UsageError, match="does not list"):
        course_of(tmp_path, None)


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"source": "files", "path": "x", "mixture": [{"name": "a", "path": "y"}]}, "contradict"),
        ({"source": "scenes", "mixture": [{"name": "a", "path": "y"}]}, "scenes"),
        ({"source": "files", "mixture": [{"name": "a", "path": "y"}, {"name": "a", "path": "z"}]}, "twice"),
    ],
)
def test_mixtures_that_make_no_sense_are_refused(tree: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DataConfig.model_validate(tree)
