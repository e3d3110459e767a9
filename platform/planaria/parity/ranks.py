"""A pool of living processes that play ranks: each task forms groups, runs, and tears them down again."""

from __future__ import annotations

import multiprocessing as mp
import os
import threading
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from planaria.layout import Layout

FORM_TIMEOUT_S = 60.0


class RankPool:
    """``size`` processes; :meth:`run` plays one generation of ``layout.world`` of them."""

    def __init__(self, size: int) -> None:
        from planaria.runtime.groups import host_store

        os.environ.setdefault("OMP_NUM_THREADS", "1")
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "transformers.models.llava.modeling_llava", "planaria.engine.native"])
        self._store = host_store("127.0.0.1")
        self._generation = 0
        self._interrupt_after: float | None = None
        self.processes: list[Any] = []
        self._pipes: list[Connection] = []
        for _ in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)

    def interrupt_forming_after(self, seconds: float | None) -> None:
        """Interrupt the groups of later tasks that long after they begin to form; None: leave them alone."""
        self._interrupt_after = seconds

    def start(
        self,
        layout: Layout,
        function: Callable[..., Any],
        *args: Any,
        ranks: Iterable[int] | None = None,
        form: bool = True,
        again: bool = False,
    ) -> None:
        """Start ``function(groups, *args)`` on every rank (or only on ``ranks``) of a new generation.

        Without ``form`` the function forms the groups; with ``again`` it is the generation of the last call.
        """
        from planaria.runtime.groups import Rendezvous

        self._generation += not again
        for rank in range(layout.world) if ranks is None else ranks:
            rendezvous = Rendezvous(self._generation, rank, layout, "127.0.0.1", self._store.port, FORM_TIMEOUT_S)
            self._pipes[rank].send((rendezvous, function, args, self._interrupt_after, form))

    def results(self, ranks: list[int]) -> list[Any]:
        """Results of the started task; an exception of a rank comes back as (type name, traceback)."""
        return [self._pipes[rank].recv() for rank in ranks]

    def run(self, layout: Layout, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Results of all ranks; raises if one failed."""
        self.start(layout, function, *args)
        answers = self.results(list(range(layout.world)))
        failed = [f"rank {rank} of {layout}: {value[1]}" for rank, (ok, value) in enumerate(answers) if not ok]
        if failed:  # all of them: those of peers that only lost their connection say nothing
            raise AssertionError("\n".join(failed))
        return [value for _, value in answers]

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _serve(pipe: Connection) -> None:
    import torch

    from planaria.runtime.groups import Groups

    torch.set_num_threads(1)
    while True:
        try:
            rendezvous, function, args, interrupt_after, form = pipe.recv()
        except EOFError:
            return
        groups = Groups(rendezvous, torch.device("cpu"))
        if interrupt_after is not None:
            threading.Timer(interrupt_after, groups.interrupt).start()
        try:
            if form:
                groups.form()
            answer = (True, function(groups, *args))
        except Exception as error:
            answer = (False, (type(error).__name__, traceback.format_exc()))
        groups.close()
        pipe.send(answer)
