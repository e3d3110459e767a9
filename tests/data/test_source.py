from __future__ import annotations

from pathlib import Path

import pytest
from tests.data.pictures import pairs, write_shard

from planaria.config import DataConfig
from planaria.data.errors import DataError
from planaria.data.source import open_dataset


def test_scenes() -> None:
    config = DataConfig.model_validate({"prompt": "Go.", "scenes": {"val_samples": 5, "caption_fraction": 1}})
    train, val = open_dataset(config, "train", 32, 1), open_dataset(config, "val", 32, 1)
    assert (len(train), len(val)) == (100_000, 5)
    assert val[0].prompt == "Go." and val[0].image.shape == (32, 32, 3)


def test_webdataset(tmp_path: Path) -> None:
    write_shard(tmp_path / "t.tar", pairs(3))
    write_shard(tmp_path / "v.tar", pairs(2))
    tree = {"source": "webdataset", "path": str(tmp_path / "t.tar"), "prompt": "Go."}
    config = DataConfig.model_validate(tree)
    assert len(open_dataset(config, "train", 32, 0)) == 3 and open_dataset(config, "train", 32, 0)[0].prompt == "Go."
    with pytest.raises(DataError, match=r"data\.val_path: not set.*evaluate\.samples"):
        open_dataset(config, "val", 32, 0)
    assert len(open_dataset(DataConfig.model_validate({**tree, "val_path": str(tmp_path / "v*")}), "val", 32, 0)) == 2


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(DataError, match="no split 'test'"):
        open_dataset(DataConfig(), "test", 32, 0)
