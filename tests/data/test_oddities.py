"""Whatever odd input: a right decode, a counted skip with a reason, or an error at once; never silent loss."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.data.oddities import Oddity, oddities

from planaria.config import DataConfig
from planaria.data.builder import BatchBuilder
from planaria.data.errors import DataError
from planaria.data.formats import FileDataset, open_files
from planaria.data.sample import Sample
from planaria.recipe import MicroBatch

ALL = {oddity.name: oddity for oddity in oddities()}


def opened(oddity: Oddity, tmp_path: Path) -> FileDataset:
    path = str(oddity.write(tmp_path))
    return open_files(path, DataConfig.model_validate({"source": "files", "path": path, "prompt": "Say."}))


def test_there_are_many_and_each_has_one_outcome() -> None:
    assert len(ALL) == len(oddities()) >= 40
    for oddity in ALL.values():
        assert sum(outcome is not None for outcome in (oddity.picture, oddity.skipped, oddity.refused)) == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ALL)
def test_outcome(name: str, tmp_path: Path) -> None:
    oddity = ALL[name]
    if oddity.refused is not None:
        with pytest.raises(DataError, match=oddity.refused) as told:
            opened(oddity, tmp_path)
        assert told.value.where.endswith(".tar") and told.value.remedy
        return
    dataset = opened(oddity, tmp_path)
    assert len(dataset) == 2
    kept: list[Sample] = []

    def collate(samples: Sequence[Sample], weights: Sequence[int]) -> MicroBatch:
        kept.extend(samples)
        return MicroBatch({}, sum(weights))

    built = BatchBuilder(dataset, collate, 0, 2, shuffle=False).build(0, 0, 2, 1)
    assert len(kept) == 2 and kept[1].answer == "sound"
    if oddity.skipped is not None:
        assert all(record.index == 0 and record.position == 0 for record in built.bad) and built.bad
        assert re.search(oddity.skipped, built.bad[0].cause), built.bad[0].cause
        assert built.micro_batches[0].ids == [1, 1]
        return
    assert not built.bad and built.micro_batches[0].ids == [0, 1]
    assert oddity.picture is not None and kept[0].answer == "odd"
    expected = np.asarray(oddity.picture.convert("RGB"), dtype=np.int64)
    found = kept[0].image
    assert found.dtype == np.uint8 and found.shape == expected.shape
    assert np.abs(found - expected).mean() < 12
