"""A rank's end of the data path: bounded requests to the loaders, and another loader when one is lost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

from planaria.config import JobConfig
from planaria.data.builder import BuiltSlice, EvalBatch
from planaria.data.errors import DataUnavailable
from planaria.data.plan import micro_batch_plan
from planaria.data.skips import Windows, batch_of
from planaria.layout import Layout

RETRY_PAUSE_S = 0.2


class LoaderFeed:
    """Implements :class:`planaria.runtime.loop.Feed` over Ray loader actors.

    ``prefetch`` steps are requested ahead. Requests carry (number of the batch, offsets), so a lost request is
    simply made again, of another loader, and nothing is read twice or skipped but the windows of ``skips``.
    """

    def __init__(
        self,
        job: JobConfig,
        layout: Layout,
        rank: int,
        loaders: Sequence[Any],
        interrupted: Callable[[], bool],
        skips: Windows = (),
    ) -> None:
        self._job, self._loaders, self._interrupted, self._skips = job, list(loaders), interrupted, skips
        plan = micro_batch_plan(job.train.global_batch, layout.dp, job.train.micro_batch)
        self._dp_rank = layout.dp_rank(rank)
        self._bounds = plan.slices[self._dp_rank]
        self._count = plan.count
        self._pending: dict[int, Any] = {}

    def set_loaders(self, loaders: Sequence[Any]) -> None:
        """Ask these loaders from now on; called from another thread."""
        self._loaders = list(loaders)

    def ask(self, step: int) -> None:
        """Have the shares of ``step`` and of the steps after it built, without waiting for them."""
        last = min(step + self._job.data.prefetch, self._job.train.steps - 1)
        for ahead in range(step, last + 1):
            if ahead not in self._pending:
                self._pending[ahead] = self._request(ahead, 0)

    def get(self, step: int) -> BuiltSlice:
        """This rank's share of ``step``.

        Raises:
            DataError: the samples cannot be built.
            DataUnavailable: no loader answers within ``data.timeout_s``.
        """
        self.ask(step)
        first = self._pending.pop(step)
        return self._await(f"step {step}", lambda attempt: first if attempt == 0 else self._request(step, attempt))

    def held_out(self, start: int, stop: int, rows: int) -> EvalBatch:
        """Held-out samples [start, stop), padded to ``rows`` rows."""
        return self._await(
            f"held-out samples {start} to {stop}",
            lambda attempt: self._loader(start + attempt).held_out.remote(start, stop, rows),
        )

    def held_out_size(self) -> int:
        """How many held-out samples there are."""
        return int(self._await("held-out size", lambda attempt: self._loader(attempt).held_out_size.remote()))

    def _request(self, step: int, attempt: int) -> Any:
        # Ranks of one tensor-parallel group share a data-parallel rank, so they ask the same loader.
        loader = self._loader(step + self._dp_rank + attempt)
        return loader.build.remote(batch_of(step, self._skips), *self._bounds, self._count)

    def _loader(self, turn: int) -> Any:
        loaders = self._loaders
        return loaders[turn % len(loaders)]

    def _await(self, what: str, request: Callable[[int], Any]) -> Any:
        """Result of ``request(0)``, or of a later attempt where a loader is lost or too slow."""
        deadline = time.monotonic() + self._job.data.timeout_s
        patience = self._job.data.timeout_s / 4
        attempt, trouble = 0, "no answer"
        while time.monotonic() < deadline:
            reference = request(attempt)
            attempt += 1
            asked = time.monotonic()
            try:
                while time.monotonic() - asked < patience:
                    if self._interrupted():
                        raise RuntimeError("the generation was aborted while waiting for data")
                    done, _ = ray.wait([reference], timeout=0.2)
                    if done:
                        return ray.get(reference)
                trouble = f"no answer within {patience:.0f} s"
                with contextlib.suppress(Exception):
                    ray.cancel(reference)
            except ray.exceptions.RayTaskError as error:
                cause = error.cause
                if isinstance(cause, OSError):  # transient: the same request may succeed
                    trouble = str(cause)
                    time.sleep(RETRY_PAUSE_S)
                    continue
                raise (cause if isinstance(cause, Exception) else error) from None
            except ray.exceptions.RayError as error:  # the loader, or the object, is lost
                trouble = type(error).__name__
                time.sleep(RETRY_PAUSE_S)
        raise DataUnavailable(
            f"{what}: {trouble}; asked {attempt} times; see the loaders' logs, or raise data.timeout_s"
        )
