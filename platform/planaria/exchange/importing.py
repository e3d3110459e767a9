"""From weights of elsewhere to a checkpoint, a bounded number of bytes in memory at a time."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from planaria.engine.protocol import GOOD_STEPS, SCALE, UPDATES
from planaria.exchange.contents import Contents
from planaria.exchange.errors import ExchangeError
from planaria.exchange.matching import Match
from planaria.exchange.source import Source
from planaria.layout import Layout
from planaria.state.boxes import Box
from planaria.state.vault import Vault
from planaria.state.writer import Piece

BATCH_BYTES = 1 << 29
"""Size of a shard file, and what is held in memory for it, unless a single tensor is larger."""


@dataclass(frozen=True)
class Imported:
    """What an import has written."""

    path: str
    step: int
    updates: int
    tensors: int
    nbytes: int


def bring_in(
    source: Source,
    found: Match,
    contents: Contents,
    vault: Vault,
    step: int,
    updates: int,
    *,
    batch_bytes: int = BATCH_BYTES,
    progress: Callable[[int], None] = lambda _: None,
) -> Imported:
    """Commit a checkpoint of ``step`` that holds the source's tensors in the job's dtype.

    At step 0 there is no optimizer state; later, where the source has none, moments are zero and ``updates`` must be.

    Args:
        updates: how often the source's optimizer has updated the weights: sets Adam's bias correction.
        progress: told the bytes of each tensor that is stored.

    Raises:
        ExchangeError: the vault holds checkpoints, or a tensor cannot be read or contradicts its tied twin.
        CheckpointError: it cannot be written. Whatever the error, nothing is left of the attempt.
    """
    check_empty(vault)
    check_ties(source, found)
    job = contents.job
    writer = vault.writer(step, f"import-{uuid.uuid4().hex[:8]}")
    slices = []
    count = total = 0
    try:
        for number, batch in enumerate(_batches(_pieces(source, found, contents, step, updates), batch_bytes)):
            slices += writer.write_shard(number, batch)
            sizes = [piece.data.nbytes for piece in batch]
            batch.clear()  # before the next one is read, so that one is held at a time
            count, total = count + len(sizes), total + sum(sizes)
            for size in sizes:
                progress(size)
        meta: Mapping[str, Any] = {
            "layout": str(Layout()),
            "job": job.model_dump(mode="json"),
            "imported": {"from": source.label},
        }
        path = writer.commit(slices, meta, expected=expected(contents, step))
    except BaseException:
        writer.abort()
        raise
    return Imported(path, step, updates, count, total)


def expected(contents: Contents, step: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that an imported checkpoint of ``step`` has."""
    every = contents.expected()
    for name in (SCALE, GOOD_STEPS):  # of no other's: a job that needs a loss scale looks for its own
        every.pop(name, None)
    return (
        every
        if step
        else {name: shape for name, shape in every.items() if name == UPDATES or name.startswith("model/")}
    )


def check_empty(vault: Vault) -> None:
    """Raise :class:`ExchangeError` if the run has checkpoints: it goes on from those, and they may be worth more."""
    if there := vault.list("names"):
        raise ExchangeError(
            f"{there[0].path}: the run has checkpoints already; import into a new one (--to, or --set name=...)"
        )


def check_ties(source: Source, found: Match) -> None:
    """Raise :class:`ExchangeError` where tied weights were saved twice and have drifted apart."""
    for name, (first, *others) in found.model.items():
        for other in others:
            if not torch.equal(source.read(first), source.read(other)):
                raise ExchangeError(
                    f"{source.label}: {first} and {other} differ, but are one tensor in the job's model ({name}); "
                    "set tie_word_embeddings to false in model.config"
                )


def _pieces(source: Source, found: Match, contents: Contents, step: int, updates: int) -> Iterator[Piece]:
    yield Piece(UPDATES, (), Box.whole(()), torch.tensor(updates))
    for name, shape in contents.parameters.items():
        key = found.model[name][0]
        yield _piece(f"model/{name}", shape, source.read(key), contents.dtype)
    if not step:
        return
    for name, shape in contents.parameters.items():
        for kind in contents.optimizer_keys if name in contents.trainable else ():
            held = found.optimizer.get((kind, name))
            value = torch.zeros(shape, dtype=contents.dtype) if held is None else source.read(held)
            yield _piece(f"optim/{kind}/{name}", shape, value, contents.dtype)


def _piece(name: str, shape: tuple[int, ...], value: torch.Tensor, dtype: torch.dtype) -> Piece:
    if not value.is_floating_point():
        raise ExchangeError(f"{name}: the source holds {value.dtype}, which are no weights of this model")
    return Piece(name, shape, Box.whole(shape), value.to(dtype).reshape(shape).contiguous())


def _batches(pieces: Iterator[Piece], limit: int) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    filled = 0
    for piece in pieces:
        if batch and filled + piece.data.nbytes > limit:
            yield batch
            batch, filled = [], 0
        batch.append(piece)
        filled += piece.data.nbytes
    if batch:
        yield batch
