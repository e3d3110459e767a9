"""``planaria evaluate``: score the newest intact checkpoint on held-out samples, in this one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planaria.commands.checkpoint import place_of
from planaria.commands.failures import UsageError
from planaria.config import JobConfig, load, parse, vault_root

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from planaria.data.builder import BatchBuilder
    from planaria.engine.native import NativeEngine
    from planaria.recipe import MicroBatch
    from planaria.state.checkpoint import Checkpoint

LONGEST_ANSWER = 64
"""Tokens that an example is decoded to at most."""


@dataclass(frozen=True)
class Example:
    """A held-out sample and what the model says to it."""

    question: str
    answer: str
    prediction: str


def evaluate(target: str, overrides: Sequence[str], step: int | None, samples: int | None, examples: int) -> int:
    """Print the held-out score of a checkpoint beside chance, and some answers."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from planaria.observe.text import score_text
    from planaria.observe.view import encodable, is_plain

    console = Console(highlight=False)
    job, checkpoint = locate(target, overrides, step)
    with checkpoint:
        if samples is not None:
            job = job.model_copy(update={"evaluate": job.evaluate.model_copy(update={"samples": samples})})
        console.print(
            Text(encodable(f"{job.name}: checkpoint of step {checkpoint.step}", console.encoding), style="bold")
        )
        scores, shown = score(job, checkpoint, examples)
    console.print(f"held out: {score_text(scores)}")
    if shown:
        table = Table(box=box.ASCII2 if is_plain(console) else box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for name in ("question", "answer", "prediction"):
            table.add_column(name, overflow="fold")
        for row in shown:
            style = "green" if row.prediction == row.answer else "red"
            cells = [encodable(cell, console.encoding) for cell in (row.question, row.answer, row.prediction)]
            table.add_row(Text(cells[0]), Text(cells[1]), Text(cells[2], style=style))
        console.print(table)
    return 0


def locate(target: str, overrides: Sequence[str], step: int | None) -> tuple[JobConfig, Checkpoint]:
    """The job and its checkpoint: the newest intact one, or that of ``step``.

    Args:
        target: a job file, or a run directory or ``s3://`` URL (whose checkpoints know their job).
        overrides: ``key=value`` pairs; only with a job file.
        step: which checkpoint; None: the newest intact one.
    """
    from planaria.paths import absolute_paths
    from planaria.state.vault import Vault

    job = None
    if "://" in target or Path(target).is_dir():
        if overrides:
            raise UsageError("--set goes with a job file; a run directory holds its own job")
        place = place_of(target)
    else:
        job = absolute_paths(load(target, overrides))
        place = vault_root(job, Path(job.storage) / job.name)
    vault = Vault(place)
    checkpoint = vault.latest_intact() if step is None else vault.at(step)
    if checkpoint is None:
        raise UsageError(f"{place}: holds no intact checkpoint; train first, or give another run directory")
    if job is None:
        try:
            stored = checkpoint.meta["job"]
        except KeyError:
            checkpoint.close()
            raise UsageError(f"{checkpoint.path}: does not say which job it belongs to; give the job file") from None
        job = parse(stored, f"{checkpoint.path} (the job stored there)")
    return job, checkpoint


def score(job: JobConfig, checkpoint: Checkpoint, examples: int) -> tuple[dict[str, Any], list[Example]]:
    """Scores over the held-out samples, and the first ``examples`` of them with greedily decoded answers."""
    import warnings
    from dataclasses import asdict

    import torch

    from planaria.data.builder import BatchBuilder
    from planaria.engine.native import NativeEngine
    from planaria.layout import Layout
    from planaria.models.choose import job_recipe
    from planaria.models.dual import DualEncoderRecipe
    from planaria.objectives.evaluate import evaluate as evaluate_samples

    recipe = job_recipe(job)
    held_out = recipe.dataset("val")
    builder = BatchBuilder(held_out, recipe.collate, job.seed, job.train.global_batch, shuffle=False)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if not job.evaluate.samples:
        raise UsageError("evaluate.samples is 0; give --samples")
    with lone_mesh(device) as mesh, warnings.catch_warnings():
        # Nobody writes into the logits here, and nothing runs backward.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        engine = NativeEngine(recipe, job, Layout(), mesh, device)
        engine.load(checkpoint)
        scores = evaluate_samples(engine, builder.eval_batch, len(held_out), job)
        asked = range(min(examples, len(held_out)))
        if isinstance(recipe, DualEncoderRecipe):
            shown = nearest(engine, builder, held_out, job, len(asked))
        else:
            shown = [example(engine, recipe, builder, held_out[at], at) for at in asked]
    return asdict(scores), shown


@contextlib.contextmanager
def lone_mesh(device: torch.device) -> Iterator[DeviceMesh]:
    """A process group of this process alone, without a store that listens anywhere."""
    import os

    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from planaria.runtime.groups import ALWAYS
    from planaria.runtime.worker import bind_gloo

    before = {name: os.environ.get(name) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    bind_gloo("127.0.0.1")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh(device.type, (1, 1, 1), mesh_dim_names=ALWAYS)
    finally:
        dist.destroy_process_group()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)


def nearest(engine: NativeEngine, builder: BatchBuilder, held_out: Any, job: JobConfig, count: int) -> list[Example]:
    """The first ``count`` pictures with the caption that the model finds nearest among those that are scored."""
    import torch

    if not count:
        return []
    total = min(job.evaluate.samples, len(held_out))
    found = []
    for start in range(0, total, job.train.micro_batch):
        stop = min(total, start + job.train.micro_batch)
        found.append(engine.features(builder.eval_batch(start, stop, stop - start).batch))
    pictures, texts = (torch.cat(side) for side in zip(*found, strict=True))
    best = (pictures[:count] @ texts.T).argmax(1).tolist()
    samples = [held_out[at] for at in range(min(count, total))]
    return [Example(sample.key, sample.answer, held_out[at].answer) for sample, at in zip(samples, best, strict=False)]


def example(engine: NativeEngine, recipe: Any, builder: BatchBuilder, sample: Any, index: int) -> Example:
    """Held-out sample ``index`` with the model's own answer."""
    built = builder.eval_batch(index, index + 1, 1)
    ids = greedy(engine, built.batch, recipe.codec.eos_id, recipe.codec.pad_id)
    return Example(sample.prompt, sample.answer, recipe.codec.decode(ids))


def greedy(engine: NativeEngine, batch: MicroBatch, eos_id: int, pad_id: int) -> list[int]:
    """The most likely continuation, token by token, of the first row's tokens before its answer."""
    import torch

    from planaria.engine.batches import to_device

    tensors = to_device(batch, engine.device)
    targets = (tensors["labels"][0] != -100).nonzero()
    start = int(targets[0]) if len(targets) else int(tensors["attention_mask"][0].sum())
    # More rows than the sample's: the blank picture that stands by a text-only one. They keep their length.
    length = max([start, *(int(mask.sum()) for mask in tensors["attention_mask"][1:])])
    room = LONGEST_ANSWER + length
    rows = len(tensors["input_ids"])
    input_ids = torch.full((rows, room), pad_id, dtype=torch.int64, device=engine.device)
    mask = torch.zeros_like(input_ids)
    for row in range(rows):
        kept = start if row == 0 else int(tensors["attention_mask"][row].sum())
        input_ids[row, :kept] = tensors["input_ids"][row, :kept]
        mask[row, :kept] = 1
    said: list[int] = []
    engine.model.eval()
    with torch.no_grad():
        while len(said) < LONGEST_ANSWER:
            end = max(start + len(said), length)
            out = engine.model(
                input_ids=input_ids[:, :end],
                attention_mask=mask[:, :end],
                pixel_values=tensors["pixel_values"].to(next(engine.model.parameters()).dtype),
                use_cache=False,
            )
            at = start + len(said)
            token = int(out.logits[0, at - 1].argmax())
            if token == eos_id:
                break
            said.append(token)
            input_ids[0, at], mask[0, at] = token, 1
    return said
