"""The checkpoint benchmark: its figures, and one small round of its contenders on real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.forms import long_form

import checkpoint
from _checkpoint import loads, saves
from _checkpoint.pool import Absent, Pool
from _checkpoint.work import Work, same, values
from _report import check
from _runs import scratch
from planaria.layout import Layout
from planaria.state.boxes import Box, uncovered

TINY = Work(layers=2, hidden=8, inner=16)


@pytest.mark.parametrize("layout", [Layout(dp_shard=4), Layout(dp_shard=3), Layout(pp=2, tp=2)])
def test_every_element_is_held(layout: Layout) -> None:
    boxes: dict[str, list[Box]] = {}
    for rank in range(layout.world):
        for tensor, box, _ in TINY.held(layout, rank):
            boxes.setdefault(tensor.name, []).append(box)
    for tensor in TINY.tensors():
        assert not uncovered(Box.whole(tensor.shape), boxes[tensor.name])


def test_values_tell_where_they_are_from() -> None:
    first, second = TINY.tensors()[:2]
    whole = values(first, Box.whole(first.shape))
    part = Box((2, 3), (4, 5))
    assert torch.equal(whole[2:6, 3:8].view(torch.int32), values(first, part).view(torch.int32))
    assert same(whole[2:6, 3:8].contiguous(), first, part)
    assert not same(values(second, part), first, part) and not same(values(first, part), first, Box((2, 2), (4, 5)))


@long_form
def test_small_states_are_saved_and_loaded_by_all() -> None:
    with scratch() as (folder, environment):
        pool = Pool(4, folder, environment)
        try:
            for layout in checkpoint.SOURCES.values():
                pool.run(saves.save_sources, TINY, str(folder), layout)
            pool.run(saves.hold, TINY)
            for name in ("memcpy", "disk", "planaria memory", "planaria vault", "dcp save", "dcp async thread"):
                for number in (1, 2):
                    found = pool.run(saves.measure, name, f"{folder}/{name}", number)
                    assert all(seconds > 0 for rank in found for seconds in rank.values())
            with pytest.raises(Absent, match="KeyError"):
                pool.run(saves.measure, "no such", f"{folder}/none", 1)
        finally:
            pool.close()
        pool = Pool(3, folder, environment)
        try:
            assert sum(pool.run(loads.hold, TINY)) >= TINY.nbytes
            for layout in checkpoint.SOURCES.values():
                for name in loads.CONTENDERS:
                    assert all(seconds > 0 for seconds in pool.run(loads.measure, name, f"{folder}/{layout}", True))
        finally:
            pool.close()


def test_figures_are_ratios_of_medians() -> None:
    rows: list[dict[str, Any]] = [
        {"contender": name, "round": turn, **found}
        for turn in (1, 2, 3)
        for name, found in {
            "memcpy": {"stall": 1.0},
            "planaria memory": {"stall": 1.25},
            "planaria vault": {"durable": 4.0},
            "planaria vault on s3": {"absent": "not here"},
            "disk": {"stall": 5.0, "durable": 5.0},
            "dcp save": {"stall": 10.0, "durable": 10.0},
            "dcp async thread": {"stall": 2.5, "durable": 12.0},
            "raw, dp4": {"load": 1.0},
            "planaria, dp4": {"load": 1.6},
            "raw, tp2 x pp2": {"load": 1.0},
            "planaria, tp2 x pp2": {"load": 2.0},
            "steps without snapshots": {"step": 0.5},
            "steps with snapshots": {"step": 0.625},
        }.items()
    ]
    result = checkpoint.build_report(rows, TINY, "2026-01-01")
    check({**vars(result), "tables": []})
    assert result.figures == {
        "stall_vs_memcpy": 1.25,
        "stall_vs_best_dcp": 0.5,
        "vault_write_vs_disk": 1.25,
        "reshard_load_vs_disk": 0.5,
        "snapshot_step_overhead": 1.25,
    }
    assert ["planaria vault on s3", "not here"] in [list(row) for table in result.tables for row in table.rows]
