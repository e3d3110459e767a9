"""Paths that mean the same in every process, whatever its working directory."""

from __future__ import annotations

from pathlib import Path

from planaria.config import JobConfig

_PATHS = (
    ("data", "path"),
    ("data", "val_path"),
    ("data", "image_root"),
    ("data", "cache_dir"),
    ("data", "tokenizer"),
    ("model", "path"),
    ("checkpoint", "path"),
)


def absolute_paths(job: JobConfig) -> JobConfig:
    """``job`` with its relative paths taken from this process's working directory; URLs stay as they are."""
    tree = job.model_dump(mode="json")
    for section, key in _PATHS:
        value = (tree[section] or {}).get(key)
        if value is not None and "://" not in value and not (key == "tokenizer" and value == "bytes"):
            tree[section][key] = str(Path(value).expanduser().absolute())
    for source in tree["data"]["mixture"]:
        if "://" not in source["path"]:
            source["path"] = str(Path(source["path"]).expanduser().absolute())
    tree["storage"] = str(Path(tree["storage"]).expanduser().absolute())
    return JobConfig.model_validate(tree)


def relative_paths(job: JobConfig) -> dict[str, str]:
    """Keys of ``job`` whose paths lead elsewhere in another working directory, with their values."""
    tree = job.model_dump(mode="json")
    found = {f"{section}.{key}": (tree[section] or {}).get(key) for section, key in _PATHS} | {
        "storage": tree["storage"]
    }
    found |= {f"data.mixture.{place}.path": source["path"] for place, source in enumerate(tree["data"]["mixture"])}
    return {
        key: value
        for key, value in found.items()
        if value is not None
        and "://" not in value
        and not (key == "data.tokenizer" and value == "bytes")
        and not Path(value).expanduser().is_absolute()
    }
