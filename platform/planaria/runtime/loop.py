"""One generation's share of training in one process: feed, step, report, checkpoint, until told to end.

Nothing here knows Ray. All ranks leave the loop at the same step boundary: whoever was asked to end says so
in the small all-reduce that opens every step, and every rank hears it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from planaria.config import JobConfig
from planaria.data.builder import BuiltSlice, EvalBatch
from planaria.engine.protocol import Engine, StepResult
from planaria.objectives.evaluate import evaluate
from planaria.observe.record import finite
from planaria.recipe import is_scored
from planaria.runtime.keeping import Keeping
from planaria.runtime.outcome import End

Report = Callable[[dict[str, Any]], None]
At = Callable[[int, str, int], None]
"""Told (step, phase, micro-batch) where this rank is; cheap."""


def _tell_nobody(step: int, phase: str, micro: int) -> None:
    pass


class Feed(Protocol):
    """Where a rank's micro-batches come from."""

    def get(self, step: int) -> BuiltSlice:
        """This rank's share of ``step``; blocks."""
        ...

    def held_out(self, start: int, stop: int, rows: int) -> EvalBatch:
        """Held-out samples [start, stop), padded to ``rows`` rows."""
        ...

    def held_out_size(self) -> int:
        """How many held-out samples there are."""
        ...


@dataclass
class Requests:
    """What the controller asked of this rank; set from other threads."""

    pause: bool = False
    stop: bool = False


def train(
    engine: Engine,
    feed: Feed,
    keeping: Keeping,
    job: JobConfig,
    requests: Requests,
    report: Report,
    at: At = _tell_nobody,
    meter: Callable[[], dict[str, Any]] = dict,
) -> End:
    """Run steps from ``engine.step_done`` to ``job.train.steps``; what ``meter`` reads goes into the report of each.

    Returns FINISHED, or PAUSED/STOPPED at a step boundary that is common to all ranks. The state is in memory then,
    and, but for a pause, on its way to durable storage.

    Raises:
        RuntimeError: a peer or the keeper was lost, or the generation was interrupted.
        DataError: this rank's data cannot be built.
        CheckpointError: the state could not be kept.
    """
    while engine.step_done < job.train.steps:
        step = engine.step_done
        began = time.monotonic()
        at(step, "data", 0)
        share = feed.get(step)
        waited = time.monotonic() - began
        at(step, "agree", 0)
        targets, pause, stop = _agree(engine, share, requests)
        # Between outer steps replicas differ, and there is no state to keep: the request is heard again until then.
        if (stop or pause) and engine.joined:
            # Nothing of this step has been done: the boundary is before it.
            keeping.checkpoint() if stop else keeping.snapshot()
            return End.STOPPED if stop else End.PAUSED
        # Before the step: whoever completes it has said long before what it consumed, though it may die at once.
        report(_share_message(step, share))
        result = engine.train_step(share.micro_batches, targets, keeping.poll, partial(at, step))
        at(step, "keep", 0)
        kept_s = keeping.after_step(result.votes)
        message = _step_message(step, result, waited, time.monotonic() - began)
        report(message | {"snapshot_s": kept_s, "complete": keeping.complete, **meter()})
        every = job.health.check_replicas_every
        if every and engine.step_done % every == 0:
            # Ranks wait for one another here as when they agree on the next step: whoever still keeps is behind.
            at(engine.step_done, "agree", 0)
            if (found := engine.compare_replicas()) is not None:
                report({"t": "replicas", "step": engine.step_done, **asdict(found)})
    if job.checkpoint.at_end:
        keeping.checkpoint()
    if job.evaluate.at_end and job.evaluate.samples and is_scored(engine.recipe):
        asked = itertools.count()

        def held_out(start: int, stop: int, rows: int) -> EvalBatch:
            at(engine.step_done, "evaluate", next(asked))
            return feed.held_out(start, stop, rows)

        scores = evaluate(engine, held_out, feed.held_out_size(), job)
        report(finite({"t": "eval", "step": engine.step_done, **asdict(scores)}))
    return End.FINISHED


def _agree(engine: Engine, share: BuiltSlice, requests: Requests) -> tuple[int, bool, bool]:
    """(targets in the global batch, pause?, stop?): the same answer on every rank.

    Counts are integers on the CPU, so the sum is exact and no device is made to wait.
    """
    # The ranks of one replica hold the same share: it counts once.
    speaks = engine.layout.speaks_for_replica(dist.get_rank())
    targets = sum(batch.targets for batch in share.micro_batches) if speaks else 0
    votes = torch.tensor([targets, int(requests.pause), int(requests.stop)], dtype=torch.int64)
    dist.all_reduce(votes)
    total, pause, stop = votes.tolist()
    return total, pause > 0, stop > 0


def _share_message(step: int, share: BuiltSlice) -> dict[str, Any]:
    return {
        "t": "share",
        "step": step,
        "ids": [index for batch in share.micro_batches for index in batch.ids],
        "tokens": sum(batch.tokens for batch in share.micro_batches),
        "bad": [asdict(record) for record in share.bad],
    }


def _step_message(step: int, result: StepResult, waited: float, took: float) -> dict[str, Any]:
    return {
        "t": "step",
        "step": step,
        "loss": finite(result.loss),
        "grad_norm": finite(result.grad_norm),
        "lr": result.lr,
        "targets": result.targets,
        "skipped": result.skipped,
        "overflow": result.overflow,
        "loss_scale": result.loss_scale,
        "data_wait_s": waited,
        "step_s": took,
        "compute_s": result.compute_s,
    }
