"""A request for data that is under way, at a loader or in a thread of this process."""

from __future__ import annotations

import concurrent.futures
import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ray

from planaria.data.batches import Batches


class LoaderGone(Exception):
    """The loader that was asked, or what it built, is lost."""


@dataclass(frozen=True)
class Asked:
    """One request.

    ``loader`` is None where this process builds. ``answer`` is a Ray reference, or a future.
    """

    loader: Any
    answer: Any

    def done(self, timeout_s: float) -> bool:
        """Whether the answer is there; waits for it up to ``timeout_s``."""
        if isinstance(self.answer, Future):
            return bool(concurrent.futures.wait([self.answer], timeout_s).done)
        return bool(ray.wait([self.answer], timeout=timeout_s)[0])

    def result(self) -> Any:
        """The answer.

        Raises:
            LoaderGone: there will be none.
            Exception: what building it raised.
        """
        try:
            return self.answer.result() if isinstance(self.answer, Future) else ray.get(self.answer)
        except ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None
        except ray.exceptions.RayError as error:
            raise LoaderGone(type(error).__name__) from error

    def forget(self) -> None:
        """Nobody waits for it any more."""
        with contextlib.suppress(Exception):
            if isinstance(self.answer, Future):
                self.answer.cancel()
            else:
                ray.cancel(self.answer)


class OwnThread:
    """Builds batches beside the training thread, one after another; the thread begins with the first of them."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._executor: ThreadPoolExecutor | None = None

    def ask(self, method: str, *args: Any) -> Asked:
        """Have a method of :class:`Batches` called."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "own-data")
        return Asked(None, self._executor.submit(getattr(self._batches, method), *args))

    def close(self) -> None:
        """End the thread, after what it is building."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
