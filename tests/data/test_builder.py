from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.pictures import pairs, write_shard

from planaria.config import ScenesConfig
from planaria.data.builder import TRIES, BadRecord, BatchBuilder, BuiltSlice
from planaria.data.collate import VLMCollator
from planaria.data.errors import DataError
from planaria.data.order import indices
from planaria.data.plan import micro_batch_plan
from planaria.data.scenes import Scenes
from planaria.data.tokens import load_tokenizer
from planaria.data.webdataset import WebDataset
from planaria.recipe import BadSample, MicroBatch


class Numbers:
    """Sample i is the number i; some are damaged, some cannot be read just now."""

    def __init__(self, n: int, damaged: Sequence[int] = (), offline: Sequence[int] = ()) -> None:
        self.n, self.damaged, self.offline = n, frozenset(damaged), set(offline)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        if index in self.damaged:
            raise BadSample(f"n/{index}", "rotten")
        if index in self.offline:
            raise OSError("server away")
        return index


def collate(samples: Sequence[int], weights: Sequence[int]) -> MicroBatch:
    arrays = {"x": np.array(samples), "w": np.array(weights)}
    return MicroBatch(arrays, targets=sum(weights), tokens=len(samples))


def step_of(builder: BatchBuilder, step: int, global_batch: int, dp: int, micro: int) -> list[BuiltSlice]:
    plan = micro_batch_plan(global_batch, dp, micro)
    return [builder.build(step, lo, hi, plan.count) for lo, hi in plan.slices]


@settings(max_examples=80, deadline=None)
@given(
    n=st.integers(1, 60),
    global_batch=st.integers(1, 24),
    dp=st.integers(1, 9),
    micro=st.integers(1, 5),
    step=st.integers(0, 50),
    rotten=st.sets(st.integers(1, 59), max_size=6),
    seed=st.integers(0, 99),
)
def test_every_layout_reads_the_same_batch(
    n: int, global_batch: int, dp: int, micro: int, step: int, rotten: set[int], seed: int
) -> None:
    damaged = {index for index in rotten if index < n and n > 12}
    dataset = Numbers(n, sorted(damaged))
    reference = BatchBuilder(dataset, collate, seed, global_batch, True).build(step, 0, global_batch, 1)
    built = step_of(BatchBuilder(dataset, collate, seed, global_batch, True), step, global_batch, dp, micro)
    assert len({len(one.micro_batches) for one in built}) == 1
    batches = [batch for one in built for batch in one.micro_batches]
    ids = [index for batch in batches for index in batch.ids]
    assert ids == reference.micro_batches[0].ids and len(ids) == global_batch == sum(b.targets for b in batches)
    assert [record for one in built for record in one.bad] == reference.bad
    for batch in batches:
        weighted = batch.arrays["x"][batch.arrays["w"] == 1].tolist()
        assert weighted == batch.ids and len(batch.arrays["x"]) == max(1, len(weighted))
    # Healthy positions are untouched; every damaged one is accounted for and replaced by a healthy sample.
    asked = indices(step * global_batch, (step + 1) * global_batch, n, seed, True)
    assert all(got == want for got, want in zip(ids, asked, strict=True) if want not in damaged)
    assert not set(ids) & damaged
    first = [(r.position - step * global_batch, r.index) for r in reference.bad if r.attempt == 0]
    assert first == [(offset, index) for offset, index in enumerate(asked) if index in damaged]


def test_an_epoch_consumes_every_sample_once() -> None:
    builder = BatchBuilder(Numbers(30), collate, 7, 6, True)
    ids = [i for t in range(5) for one in step_of(builder, t, 6, 4, 1) for b in one.micro_batches for i in b.ids]
    assert sorted(ids) == list(range(30)) and ids != list(range(30))
    plain = BatchBuilder(Numbers(30), collate, 7, 6, False)
    assert [i for t in range(5) for b in plain.build(t, 0, 6, 2).micro_batches for i in b.ids] == list(range(30))


def test_substitutes_are_recorded_and_depend_on_the_position_alone() -> None:
    builder = BatchBuilder(Numbers(10, damaged=[0, 1, 2, 3, 4]), collate, 0, 10, False)
    built = builder.build(0, 0, 10, 1)
    assert [r for r in built.bad if r.attempt == 0] == [BadRecord(i, i, 0, f"n/{i}", "rotten") for i in range(5)]
    per_position = {p: [r.attempt for r in built.bad if r.position == p] for p in range(5)}
    assert all(attempts == list(range(len(attempts))) for attempts in per_position.values())
    assert max(len(attempts) for attempts in per_position.values()) > 1  # a damaged substitute is replaced again
    ids = built.micro_batches[0].ids
    assert ids[5:] == [5, 6, 7, 8, 9] and all(index >= 5 for index in ids[:5])
    assert builder.build(0, 3, 4, 1).micro_batches[0].ids == ids[3:4]
    # The next epoch meets the same damage at other positions, and may choose others.
    assert [r.position for r in builder.build(1, 0, 10, 1).bad if r.attempt == 0] == [10, 11, 12, 13, 14]
    assert builder.build(1, 0, 10, 1).micro_batches[0].ids != ids


def test_too_much_damage_stops_with_the_reason() -> None:
    builder = BatchBuilder(Numbers(50, damaged=range(50)), collate, 0, 4, True)
    with pytest.raises(DataError, match=rf"n/\d+: damaged \(rotten\), .* position 9 \({TRIES + 1} in all\)"):
        builder.build(2, 1, 2, 1)


def test_empty_micro_batches_hold_one_filler() -> None:
    builder = BatchBuilder(Numbers(10, damaged=[0]), collate, 0, 4, False)
    built = builder.build(0, 2, 3, 3)
    assert [batch.ids for batch in built.micro_batches] == [[2], [], []]
    assert [batch.arrays["w"].tolist() for batch in built.micro_batches] == [[1], [0], [0]]
    assert built.bad == [] and built.micro_batches[1].targets == 0
    empty = builder.build(3, 4, 4, 2)
    assert [batch.ids for batch in empty.micro_batches] == [[], []]
    assert all(batch.arrays["x"].tolist() != [0] for batch in empty.micro_batches)  # a healthy one


def test_transient_trouble_passes_through_and_the_call_can_be_repeated() -> None:
    dataset = Numbers(10, offline=[3])
    builder = BatchBuilder(dataset, collate, 0, 10, False)
    with pytest.raises(OSError, match="server away"):
        builder.build(0, 0, 10, 2)
    dataset.offline.clear()
    assert builder.build(0, 0, 10, 1).micro_batches[0].ids == list(range(10))


def test_evaluation_pads_and_leaves_damage_out() -> None:
    builder = BatchBuilder(Numbers(10, damaged=[8]), collate, 0, 4, True)
    last = builder.eval_batch(7, 10, 5)
    assert last.batch.ids == [7, 9] and last.batch.arrays["w"].tolist() == [1, 0, 1, 0, 0]
    assert last.batch.arrays["x"].tolist()[::2] == [7, 9, last.batch.arrays["x"][4]]
    assert last.bad == [BadRecord(8, 8, 0, "n/8", "rotten")] and last.choices == [0] * 5
    assert builder.eval_batch(10, 10, 2).batch.arrays["w"].tolist() == [0, 0]
    for start, stop, rows in ((0, 4, 3), (9, 11, 4), (3, 2, 4), (0, 0, 0)):
        with pytest.raises(ValueError, match="do not make a batch"):
            builder.eval_batch(start, stop, rows)


def test_nonsense_is_refused() -> None:
    with pytest.raises(DataError, match="no samples"):
        BatchBuilder(Numbers(0), collate, 0, 4, True)
    with pytest.raises(ValueError, match="global_batch=0"):
        BatchBuilder(Numbers(1), collate, 0, 0, True)
    builder = BatchBuilder(Numbers(9), collate, 0, 4, True)
    for step, lo, hi, count in ((-1, 0, 4, 1), (0, 0, 5, 1), (0, 3, 2, 1), (0, -1, 2, 1), (0, 0, 4, 0)):
        with pytest.raises(ValueError, match=r"lie outside|count=0"):
            builder.build(step, lo, hi, count)


def test_scenes_end_to_end() -> None:
    codec = load_tokenizer("bytes")
    dataset = Scenes(ScenesConfig.model_validate({"text_only_fraction": 0.5}), "val", 32, 0)
    collator = VLMCollator(codec, 16, 32, (0.5,) * 3, (0.5,) * 3, 256)
    builder = BatchBuilder(dataset, collator, 0, 13, True)
    whole = builder.build(4, 0, 13, 1).micro_batches[0]
    parts = [batch for one in step_of(builder, 4, 13, 5, 2) for batch in one.micro_batches]
    assert sum(batch.targets for batch in parts) == whole.targets > 0
    assert sum(batch.tokens for batch in parts) == whole.tokens
    assert all(batch.arrays["pixel_values"].shape[0] >= 1 for batch in parts)
    held_out = builder.eval_batch(508, 512, 6)
    assert held_out.choices == [len(dataset[i].choices) for i in range(508, 512)] + [0, 0]
    # No scene of any kind is so long that its text would be cut.
    rows = [dataset[i] for i in range(300)]
    assert max(16 + len(codec.encode(f"\n{s.prompt}\n{s.answer}")) + 1 for s in rows) <= 256


def test_a_damaged_shard_sample_is_replaced(tmp_path: Path) -> None:
    members = [("bad.jpg", b"<html>"), ("bad.txt", b"hi"), *pairs(7)]
    write_shard(tmp_path / "a.tar", members)
    dataset = WebDataset(str(tmp_path / "a.tar"), "Say.")
    collator = VLMCollator(load_tokenizer("bytes"), 4, 16, (0.5,) * 3, (0.5,) * 3, 64)
    built = BatchBuilder(dataset, collator, 0, 8, True).build(0, 0, 8, 2)
    assert [record.key for record in built.bad if record.attempt == 0] == ["a.tar/bad"]
    assert "not a picture" in built.bad[0].cause
    assert sum(len(batch.ids) for batch in built.micro_batches) == 8
