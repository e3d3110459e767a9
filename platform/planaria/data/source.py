"""From the ``data`` section of a job to its samples."""

from __future__ import annotations

from planaria.config import DataConfig
from planaria.data.errors import DataError
from planaria.data.formats import open_files
from planaria.data.mixture import Mixture, Source
from planaria.data.rows import Needs
from planaria.data.scenes import Scenes
from planaria.recipe import Dataset

NO_NEEDS = Needs()


def open_dataset(config: DataConfig, split: str, image_size: int, seed: int, needs: Needs = NO_NEEDS) -> Dataset:
    """The samples of ``"train"`` or ``"val"``.

    Args:
        config: the ``data`` section.
        split: ``"train"`` or ``"val"``. ``"val"`` of files needs ``val_path``: training samples are never scored in
            its place.
        image_size: side in pixels of the pictures that scenes render; files keep the size of their pictures.
        seed: of the scenes; files do not depend on it.
        needs: what makes a sample of files useless to the model.

    Raises:
        DataError: an unknown split, ``"val"`` without ``val_path``, or files that cannot be used.
    """
    if split not in ("train", "val"):
        raise DataError("data", f"no split {split!r}", "use train or val")
    if config.source == "scenes":
        return Scenes(config.scenes, split, image_size, seed, config.prompt)
    if config.source == "webdataset":
        config = config.model_copy(update={"format": "webdataset"})
    if split == "train" and config.mixture:
        return Mixture([Source(one.name, one.weight, open_files(one.path, config, needs)) for one in config.mixture])
    pattern = config.path if split == "train" else config.val_path
    if pattern is None:
        key = "data.path" if split == "train" else "data.val_path"
        remedy = "set it to a file, folder or glob" + (", or set evaluate.samples to 0" if split == "val" else "")
        raise DataError(key, f"not set, so there are no {split} samples", remedy)
    return open_files(pattern, config, needs)
