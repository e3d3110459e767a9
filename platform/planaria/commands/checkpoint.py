"""``planaria checkpoint``: list and verify the durable state of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from planaria.commands.failures import FAILED, UsageError, complain
from planaria.config import parse, vault_root

if TYPE_CHECKING:
    from planaria.state.vault import Vault


def ls(run_dir: str) -> int:
    """Print every checkpoint with its layout, size and soundness (files and manifest; not every byte)."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from planaria.observe.text import quantity
    from planaria.observe.view import encodable, is_plain
    from planaria.state.errors import CheckpointError
    from planaria.state.vault import Vault

    vault = Vault(place_of(run_dir), on_problem=lambda _: None)
    found = vault.list("shallow")
    if not found:
        print(f"{run_dir}: no checkpoints yet")
        return 0
    console = Console(highlight=False)
    table = Table(box=box.ASCII2 if is_plain(console) else box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("step", "layout", "tensors", "bytes", "state"):
        table.add_column(name, justify="left" if name in ("layout", "state") else "right", overflow="fold")
    for info in found:
        layout, tensors, size, state = "-", "-", "-", info.problem or "intact"
        if info.intact:
            try:
                with vault.at(info.step) as checkpoint:
                    layout, tensors = str(checkpoint.meta.get("layout", "-")), str(len(checkpoint.tensors))
                    size = quantity(checkpoint.nbytes)
            except CheckpointError as error:  # replaced or removed meanwhile
                state = str(error)
        cells = (str(info.step), layout, tensors, size, state)
        table.add_row(*(Text(encodable(cell, console.encoding)) for cell in cells))
    console.print(table)
    return 0


def verify(run_dir: str, step: int | None) -> int:
    """Read every slice back and compare it with its checksum; 1 if anything is damaged, all of which is named."""
    from planaria.state.errors import CheckpointError, StorageUnavailable
    from planaria.state.vault import Vault

    vault = Vault(place_of(run_dir), on_problem=lambda _: None)
    steps = [info.step for info in vault.list("names")] if step is None else [step]
    if not steps:
        complain(f"{run_dir}: holds no checkpoint")
        return FAILED
    damaged = 0
    for number in steps:
        try:
            with vault.at(number) as checkpoint:
                problems = checkpoint.verify()
                count = len(list(checkpoint.index))
        except StorageUnavailable:
            raise
        except CheckpointError as error:
            problems, count = str(error).splitlines(), 0
        for problem in problems:
            complain(problem)
        damaged += bool(problems)
        bad = f"DAMAGED, {len(problems)} problem{'s' if len(problems) > 1 else ''}"
        print(f"step {number}: {bad if problems else f'intact, {count} slices'}")
    return FAILED if damaged else 0


def pick(vault: Vault, run_dir: str, step: int | None) -> int:
    """``step``, else the newest one that is there, damaged or not: a command falls back to no other by itself."""
    if step is not None:
        return step
    found = vault.list("names")
    if not found:
        raise UsageError(f"{run_dir}: holds no checkpoint; train first, or give another run directory")
    return found[0].step


def place_of(target: str) -> str:
    """Where the checkpoints of ``target`` lie: a run directory, or an ``s3://`` URL that holds ``checkpoints``.

    The run directory of a job with ``checkpoint.path`` knows its place by ``job.json``.
    """
    if "://" in target:
        if not target.startswith("s3://"):
            raise UsageError(f"{target}: give a run directory or an s3://bucket/prefix URL")
        if target.rstrip("/").endswith("/checkpoints"):
            raise UsageError(f"{target}: lies inside the place of a run; leave /checkpoints out")
        return target
    run_dir = checked(target)
    try:
        job = parse(json.loads((Path(run_dir) / "job.json").read_text(encoding="utf-8")), f"{run_dir}/job.json")
    except (OSError, ValueError):  # of another version, or none: then the place that it has by default
        return run_dir
    return vault_root(job, run_dir)


def checked(run_dir: str) -> str:
    """``run_dir``, if it can hold checkpoints."""
    folder = Path(run_dir)
    if not folder.is_dir():
        raise UsageError(f"{run_dir}: no such folder; give a run directory, i.e. the job's storage and name")
    if folder.name == "checkpoints" or (folder / "manifest.json").exists():
        raise UsageError(f"{run_dir}: lies inside a run directory; give the run directory itself")
    return run_dir
