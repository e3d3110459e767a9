"""From the ``data`` section of a job to its samples."""

from __future__ import annotations

from planaria.config import DataConfig
from planaria.data.errors import DataError
from planaria.data.scenes import Scenes
from planaria.data.webdataset import WebDataset
from planaria.recipe import Dataset


def open_dataset(config: DataConfig, split: str, image_size: int, seed: int) -> Dataset:
    """The samples of ``"train"`` or ``"val"``.

    Args:
        config: the ``data`` section.
        split: ``"train"`` or ``"val"``. ``"val"`` of a webdataset needs ``val_path``: training samples are
            never scored in its place.
        image_size: side in pixels of the pictures that scenes render; shards keep the size of their pictures.
        seed: of the scenes; shards do not depend on it.

    Raises:
        DataError: an unknown split, ``"val"`` without ``val_path``, or shards that cannot be used.
    """
    if split not in ("train", "val"):
        raise DataError("data", f"no split {split!r}", "use train or val")
    if config.source == "scenes":
        return Scenes(config.scenes, split, image_size, seed, config.prompt)
    pattern = config.path if split == "train" else config.val_path
    if pattern is None:
        key = "data.path" if split == "train" else "data.val_path"
        remedy = "set it to a glob of shards" + (", or set evaluate.samples to 0" if split == "val" else "")
        raise DataError(key, f"not set, so there are no {split} samples", remedy)
    return WebDataset(pattern, config.prompt)
