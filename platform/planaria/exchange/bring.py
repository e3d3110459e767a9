"""An import from beginning to end: what kind of source it is, how far it had come, and what the user should know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from planaria.config import JobConfig, vault_root
from planaria.exchange.contents import Contents
from planaria.exchange.counts import find_step, find_updates
from planaria.exchange.dcp import DcpSource
from planaria.exchange.errors import ExchangeError, some
from planaria.exchange.hub import HubSource
from planaria.exchange.hub_config import check_config
from planaria.exchange.importing import bring_in, check_empty
from planaria.exchange.matching import match
from planaria.state.vault import Vault


@dataclass(frozen=True)
class Brought:
    """What an import has done."""

    path: str
    step: int
    updates: int
    tensors: int
    nbytes: int
    notes: tuple[str, ...]


def bring(
    folder: Path,
    job: JobConfig,
    step: int | None = None,
    *,
    fresh_optimizer: bool = False,
    ignore: Sequence[str] = (),
    progress: Callable[[int], None] = lambda _: None,
) -> Brought:
    """Make the weights in ``folder`` a checkpoint of ``job``, in its run directory.

    Args:
        folder: a Hugging Face directory, or one that torch.distributed.checkpoint has saved.
        job: with absolute paths; its next training goes on from the checkpoint.
        step: that the checkpoint counts as; None: what the folder says, 0 for Hugging Face.
        fresh_optimizer: leave the optimizer's state out.
        ignore: globs of tensors to pass over.

    Raises:
        ExchangeError: the folder cannot be read, is not of the job's model, or the run has checkpoints.
        ConfigError: the job's model cannot be built.
        CheckpointError: the checkpoint cannot be written.
    """
    vault = Vault(vault_root(job, Path(job.storage) / job.name), keep_last=job.checkpoint.keep_last)
    check_empty(vault)
    if job.model is not None and job.model.lora is not None:
        raise ExchangeError(
            f"{folder}: a job with adapters does not import its frozen weights; it starts from them with model.path"
        )
    contents = Contents(job)
    source = open_source(folder)
    found = match(source.shapes(), contents, source.label, ignore=ignore, fresh_optimizer=fresh_optimizer)
    updates = find_updates(source, found)
    if step is None:
        step = find_step(source, updates) if isinstance(source, DcpSource) else 0
    if step > job.train.steps:
        raise ExchangeError(
            f"{folder}: step {step} lies beyond the end of the job, train.steps={job.train.steps}; raise train.steps, "
            "or give the step that it shall count as with --step"
        )
    check_config(folder, contents)
    notes = []
    if found.passed_over:
        notes.append(f"{len(found.passed_over)} tensors were not needed ({some(found.passed_over)})")
    kept = bool(found.optimizer) and step > 0
    if step > 0 and contents.optimizer_keys and not found.optimizer:
        notes.append("no optimizer state: moments begin at zero")
    elif found.optimizer and not kept:
        notes.append("a run begins at step 0 with a fresh optimizer: its state was left out")
    # Without a count of its own an optimizer has updated at every step.
    counted = (step if updates is None else updates) if kept else 0
    done = bring_in(source, found, contents, vault, step, counted, progress=progress)
    return Brought(done.path, step, counted, done.tensors, done.nbytes, tuple(notes))


def open_source(folder: Path) -> DcpSource | HubSource:
    """The source at ``folder``, by what lies there."""
    if not folder.is_dir():
        raise ExchangeError(f"{folder}: no such folder; give a Hugging Face or torch.distributed.checkpoint directory")
    if DcpSource.is_one(folder):
        return DcpSource(folder)
    if HubSource.is_one(folder):
        return HubSource(folder)
    if (folder / "manifest.json").is_file() or (folder / "checkpoints").is_dir():
        raise ExchangeError(f"{folder}: is Planaria's own; planaria train goes on from it without an import")
    if any(folder.glob("*.bin")):
        raise ExchangeError(
            f"{folder}: its weights are pickles (*.bin), which are not read; convert them with save_pretrained() of a "
            "recent transformers"
        )
    raise ExchangeError(
        f"{folder}: holds neither model.safetensors (or its index) nor .metadata of torch.distributed.checkpoint"
    )
