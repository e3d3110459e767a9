"""The benchmark of loading: its figures, its shards, and that two contenders make the same batch of a pair."""

from __future__ import annotations

import argparse
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import data as bench
from _data.shards import write_shards
from _data.work import MEAN, STD, Pairs, batch_of, collator
from planaria.data.images import normalise
from planaria.data.sample import Sample


def _row(contender: str, rate: float, turn: int) -> dict[str, Any]:
    found = {"pairs_per_s": rate, "pairs_per_cpu_s": rate / 2, "first_batch_s": 1.0, "mib": 9.0}
    return {"set": "224 px", "contender": contender, "round": turn, **found}


def test_figures_are_ratios_of_medians_and_absence_is_told() -> None:
    rows = [_row(bench.OURS, rate, turn) for turn, rate in enumerate((90.0, 120.0, 500.0))]
    rows += [_row(bench.PEER, 100.0, turn) for turn in range(3)]
    rows.append({"set": "224 px", "contender": "datasets streaming", "round": 0, "absent": "no such module"})
    options = argparse.Namespace(batch=32, rounds=3, seconds=8.0)
    result = bench.build_report(rows, ["224 px"], options, "2026-01-31")
    assert result.figures.pop("balance_utilisation") >= 0.95 > result.figures.pop("balance_utilisation_random")
    assert result.figures == {
        "pairs_vs_webdataset_224_px": pytest.approx(1.2),
        "pairs_vs_webdataset_per_cpu_224_px": pytest.approx(1.2),
    }
    absent = {row[0]: row[-1] for row in result.tables[0].rows}
    assert absent["datasets streaming"] == "no such module" and absent[bench.OURS] == "-"


def test_shards_hold_what_is_read_and_both_ways_make_the_same_batch(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, 5, 48)
    assert [path.name for path in paths] == ["train-00000.tar"]
    recipe = Pairs(str(tmp_path / "*.tar"))
    dataset = recipe.dataset("train")
    assert len(dataset) == 5
    samples: list[Sample] = [dataset[index] for index in range(5)]
    ours = recipe.collate(samples, [1] * 5).arrays
    with tarfile.open(paths[0]) as tar:
        files = [tar.extractfile(f"{index:07d}.jpg") for index in range(5)]
        pictures = [np.asarray(Image.open(file).convert("RGB")) for file in files if file is not None]
    theirs = batch_of(pictures, [sample.answer for sample in samples], collator())
    assert (theirs["pixel_values"] == normalise(ours["pixel_values"], MEAN, STD)).all()
    assert (theirs["input_ids"] == ours["input_ids"]).all()
