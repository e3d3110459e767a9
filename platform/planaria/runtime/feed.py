"""A rank's end of the data path: bounded requests to the loaders, and its own process where no loader answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from planaria.config import JobConfig
from planaria.data.batches import Batches
from planaria.data.builder import BuiltSlice, EvalBatch
from planaria.data.errors import DataUnavailable
from planaria.data.plan import micro_batch_plan
from planaria.data.skips import Windows, batch_of
from planaria.layout import Layout
from planaria.runtime.asked import Asked, LoaderGone, OwnThread

RETRY_PAUSE_S = 0.2
HELP_S = 2.0
"""A rank that has waited this long for a loader builds the batch itself too: it has nothing else to do."""
DOUBT_S = 10.0
"""A loader that did not answer is asked again after this time, or as soon as the controller names the loaders anew."""
GLANCE_S = 0.02
"""Seconds between two looks where two answers are awaited."""


class LoaderFeed:
    """Implements :class:`planaria.runtime.loop.Feed` over Ray loader actors.

    ``prefetch`` steps are requested ahead. Requests carry (number of the batch, offsets), so a lost request is
    simply made again, of another loader, and nothing is read twice or skipped but the windows of ``skips``. While no
    loader lives, or none answers, the rank builds its share in a thread of its own: the same function of the same
    arguments, so nobody can tell who built it.

    Args:
        job: says how batches are cut, and how long to wait.
        layout, rank: whose share it is.
        loaders: handles of the loaders; may be empty.
        own: builds here what no loader does.
        interrupted: whether the generation was aborted.
        skips: windows of the data that are left out.
    """

    def __init__(
        self,
        job: JobConfig,
        layout: Layout,
        rank: int,
        loaders: Sequence[Any],
        own: Batches,
        interrupted: Callable[[], bool],
        skips: Windows = (),
    ) -> None:
        self._job, self._loaders, self._interrupted, self._skips = job, list(loaders), interrupted, skips
        plan = micro_batch_plan(job.train.global_batch, layout.dp, job.train.micro_batch)
        self._dp_rank = layout.dp_rank(rank)
        self._bounds = plan.slices[self._dp_rank]
        self._count = plan.count
        self._pending: dict[int, Asked] = {}
        self._own = OwnThread(own)
        self._doubts: list[tuple[Any, float]] = []
        """Loaders that did not answer, and until when they are left alone."""

    def set_loaders(self, loaders: Sequence[Any]) -> None:
        """Ask these loaders from now on; none: build here. Called from another thread."""
        self._doubts, self._loaders = [], list(loaders)

    def ask(self, step: int) -> None:
        """Have the shares of ``step`` and of the steps after it built, without waiting for them."""
        last = min(step + self._job.data.prefetch, self._job.train.steps - 1)
        for ahead in range(step, last + 1):
            asked = self._pending.get(ahead)
            if asked is None or self._vain(asked):
                self._pending[ahead] = self._ask(self._turn(ahead), "build", self._share(ahead))

    def get(self, step: int) -> BuiltSlice:
        """This rank's share of ``step``.

        Raises:
            DataError: the samples cannot be built.
            DataUnavailable: neither a loader nor this process has built it within ``data.timeout_s``.
        """
        self.ask(step)
        first = self._pending.pop(step)
        found: BuiltSlice = self._await(f"step {step}", self._turn(step), "build", self._share(step), first)
        return found

    def held_out(self, start: int, stop: int, rows: int) -> EvalBatch:
        """Held-out samples [start, stop), padded to ``rows`` rows."""
        found: EvalBatch = self._await(f"held-out samples {start} to {stop}", start, "held_out", (start, stop, rows))
        return found

    def held_out_size(self) -> int:
        """How many held-out samples there are."""
        return int(self._await("held-out size", 0, "held_out_size", ()))

    def ready(self) -> int:
        """How many of the batches that were asked for ahead are there already."""
        return sum(asked.done(0.0) for asked in list(self._pending.values()))

    def close(self) -> None:
        """Nothing is awaited any more."""
        for asked in self._pending.values():
            asked.forget()
        self._own.close()

    def _turn(self, step: int) -> int:
        # Ranks of one tensor-parallel group share a data-parallel rank, so they ask the same loader.
        return step + self._dp_rank

    def _share(self, step: int) -> tuple[int, ...]:
        return (batch_of(step, self._skips), *self._bounds, self._count)

    def _ask(self, turn: int, method: str, args: tuple[int, ...]) -> Asked:
        """Ask a loader, or this process if there is none."""
        loader = self._loader(turn)
        if loader is None:
            return self._own.ask(method, *args)
        return Asked(loader, getattr(loader, method).remote(*args))

    def _loader(self, turn: int) -> Any:
        """Whose turn it is, of the loaders that answer; None if none does."""
        doubted = self._doubted()
        loaders = [loader for loader in self._loaders if loader not in doubted]
        return loaders[turn % len(loaders)] if loaders else None

    def _doubt(self, loader: Any) -> None:
        self._doubts = [*self._doubts, (loader, time.monotonic() + DOUBT_S)]

    def _leave(self, slower: Asked | None) -> None:
        """Somebody else was faster."""
        if slower is not None:
            slower.forget()
            if slower.loader is not None:
                self._doubt(slower.loader)

    def _doubted(self) -> list[Any]:
        now = time.monotonic()
        return [loader for loader, until in self._doubts if until > now]

    def _vain(self, asked: Asked) -> bool:
        """Whether no answer can be expected of a loader, since it is gone or silent, and none has come."""
        if asked.loader is None or (asked.loader in self._loaders and asked.loader not in self._doubted()):
            return False
        return not asked.done(0.0)

    def _await(self, what: str, turn: int, method: str, args: tuple[int, ...], first: Asked | None = None) -> Any:
        """What ``method`` answers: of the loader that was asked first, of another one where that is lost or too slow,
        or built here."""
        began = since = time.monotonic()
        limit_s = self._job.data.timeout_s
        first = first or self._ask(turn, method, args)
        asked, own = (None, first) if first.loader is None else (first, None)
        tries, trouble, own_again = 1, "no answer", began
        while (now := time.monotonic()) - began < limit_s:
            if self._interrupted():
                raise RuntimeError("the generation was aborted while waiting for data")
            if asked is not None and (late := now - since > limit_s / 4) | self._vain(asked):
                trouble = f"no answer within {limit_s / 4:.0f} s" if late else "the loader is gone"
                self._leave(asked)
                asked = None
            if asked is None and (loader := self._loader(turn + tries)) is not None:
                asked, since, tries = Asked(loader, getattr(loader, method).remote(*args)), now, tries + 1
            if own is None and now >= own_again and (asked is None or now - began > HELP_S):
                own = self._own.ask(method, *args)
            under_way = [one for one in (asked, own) if one is not None]
            if not under_way:
                time.sleep(RETRY_PAUSE_S)
            for one in under_way:
                if not one.done(GLANCE_S if len(under_way) > 1 else RETRY_PAUSE_S):
                    continue
                try:
                    found = one.result()
                except LoaderGone as error:
                    trouble = str(error)
                    self._doubt(one.loader)
                except OSError as error:  # transient: the same request may succeed
                    trouble = str(error)
                    time.sleep(RETRY_PAUSE_S)
                except Exception as error:
                    # A loader's word counts. Here the data may merely be out of reach: a folder that this node lacks.
                    if one is asked:
                        raise
                    trouble, own_again = f"built here: {error}", began + limit_s
                else:
                    self._leave(asked if one is own else own)
                    return found
                asked, own = (None, own) if one is asked else (asked, None)
        raise DataUnavailable(f"{what}: {trouble}; asked {tries} times; see the loaders' logs, or raise data.timeout_s")
