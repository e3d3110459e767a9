"""A folder that appears whole: written beside its place under another name, then renamed."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from planaria.exchange.errors import ExchangeError


@contextmanager
def appearing(target: Path, force: bool, needed: int) -> Iterator[Path]:
    """An empty folder to write into, which becomes ``target`` at the end of the block.

    Whatever goes wrong in the block, nothing of it is left, and what is at ``target`` stays as it is.

    Args:
        force: replace a Hugging Face directory that is there.
        needed: bytes that will be written.

    Raises:
        ExchangeError: something is at ``target``, its parent cannot be written, or the disk is too full.
    """
    target = target.expanduser().absolute()
    check_target(target, force)
    _check_space(target, needed)
    temp = target.with_name(f".{target.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temp.mkdir()
        yield temp
        _sync(temp)
        _put(temp, target, force)
        _sync_folder(target.parent)
    except OSError as error:
        reason, remedy = error.strerror or str(error), "check its permissions"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason, remedy = f"no space left, {needed} bytes needed", "free some, or give another --to"
        raise ExchangeError(
            f"{error.filename or target}: {reason}; nothing is left of this attempt; {remedy}"
        ) from error
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def check_target(target: Path, force: bool) -> None:
    """Raise :class:`ExchangeError` if an export must not be put at ``target``."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise ExchangeError(f"{target}: exists and is no folder; give the name of a new folder")
    if not target.exists() or not any(target.iterdir()):
        return
    if not force:
        raise ExchangeError(f"{target}: exists and is not empty; give another --to, or --force to replace it")
    foreign = [entry.name for entry in target.iterdir() if entry.is_dir()]
    if not (target / "config.json").is_file() or foreign:
        what = f"it holds the folder {foreign[0]}" if foreign else "it holds no config.json"
        raise ExchangeError(
            f"{target}: does not look like an exported model ({what}), so not even --force replaces it; "
            "give another --to, or remove it yourself"
        )


def _put(temp: Path, target: Path, force: bool) -> None:
    check_target(target, force)  # it may have appeared meanwhile
    aside = temp.with_name(temp.name.replace(".tmp-", ".old-"))
    there = target.exists()
    if there:
        target.rename(aside)
    try:
        temp.rename(target)
    except OSError:
        if there:
            aside.rename(target)
        raise
    if there:
        shutil.rmtree(aside, ignore_errors=True)


def _check_space(target: Path, needed: int) -> None:
    there = next(folder for folder in target.parents if folder.exists())
    try:
        free = shutil.disk_usage(there).free
    except OSError:
        return  # writing will tell
    if free < needed:
        raise ExchangeError(
            f"{target}: no space: {needed} bytes needed, {free} bytes free; free some, or give another --to"
        )


def _sync(folder: Path) -> None:
    for file in folder.iterdir():
        if file.is_file():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
