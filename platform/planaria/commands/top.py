"""``planaria top``: the live view of a running job, from any shell that reaches its cluster or its folder."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from planaria.commands.failures import UsageError

Seen = dict[str, Any]
Source = Callable[[], Seen | None]
"""Looks once; None: nobody answers at the moment."""


CONNECT_S = 5.0


class Ended(Exception):
    """The job's controller is gone for good."""


def top(run: str | None, address: str | None, once: bool, interval_s: float) -> int:
    """Show a job until it ends or Ctrl-C; one frame only with ``once``, or where there is no terminal.

    Args:
        run: a run directory, or the name of a job in the cluster; None: the only one that runs there.
        address: of the Ray cluster; None: ``RAY_ADDRESS``, or one on this machine.
        once: print a single frame.
        interval_s: seconds between looks.

    Raises:
        UsageError: no such run, no cluster, or more than one job to choose from.
    """
    from rich.console import Console

    console = Console(highlight=False)
    with contextlib.suppress(KeyboardInterrupt), _source(console, run, address) as source:
        if once or not console.is_terminal or console.is_dumb_terminal:
            seen = source()
            if seen is None:
                raise UsageError("the job's controller does not answer; try again in a moment")
            console.print(_frame(console, seen, None))
            for note in notes(seen):
                console.print(note, style="yellow")
            return 0
        watch(console, source, interval_s)
    return 0


def watch(console: Any, source: Source, interval_s: float) -> None:
    """Draw what ``source`` sees until the job has ended; the last frame stays on the terminal."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    seen: Seen | None = None
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                fresh = source()
            except Ended:
                break
            seen = fresh or seen
            if seen is not None:
                said = notes(seen) if fresh is not None else ["no answer; trying again"]
                lines = [Text(note, style="yellow") for note in said]
                live.update(Group(*lines, _frame(console, seen, console.height - len(lines))), refresh=True)
                if seen["status"].get("final"):
                    break
            time.sleep(interval_s)
    if seen is not None:
        console.print(_frame(console, seen, None))


def notes(seen: Seen) -> list[str]:
    """What a reader should know of what is seen."""
    from planaria.commands.status import QUIET_S
    from planaria.observe.text import duration

    quiet = seen.get("quiet_s") or 0.0
    return [f"nothing was written for {duration(quiet)}: it has crashed or hangs"] if quiet > QUIET_S else []


def _frame(console: Any, seen: Seen, height: int | None) -> Any:
    from planaria.observe.onlook import frame
    from planaria.observe.view import is_plain

    now = seen.get("ended") or time.time()
    return frame(seen, now=now, width=max(20, console.width - 1), height=height, plain=is_plain(console))


@contextlib.contextmanager
def _source(console: Any, run: str | None, address: str | None) -> Iterator[Source]:
    """Where to look: at the folder, if it is one and no cluster is named; else at the cluster."""
    from planaria.commands.onlook import look_at_folder

    if run is not None and address is None and Path(run).is_dir():
        folder = run
        look_at_folder(folder, time.time())  # refused before the screen changes
        yield lambda: look_at_folder(folder, time.time())
        return
    from planaria.commands.train import connect

    refuse_silent(address)
    with contextlib.ExitStack() as stack:
        with console.status("connecting to the cluster"):
            stack.callback(connect(address or "auto", None))
            source = _cluster(run)
        yield source


def refuse_silent(address: str | None) -> None:
    """Ray itself would try for minutes to reach a head where nobody listens.

    Raises:
        UsageError: nobody does at ``HOST:PORT``; addresses of other forms are left to Ray.
    """
    host, _, port = (address or "").rpartition(":")
    if not host or "/" in host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"--address {address}: nobody answers there ({error}); is it the head's host and port?"
        ) from None


def _cluster(run: str | None) -> Source:
    """The job of that name, or in that folder, or the only one.

    Raises:
        UsageError: none, or more than one.
    """
    import ray

    from planaria.control.onlookers import controllers, look

    def at(controller: Any) -> Seen | None:
        try:
            return look(controller)
        except ray.exceptions.RayActorError:
            raise Ended from None

    found: list[tuple[Any, Seen]] = []
    for controller in controllers():
        with contextlib.suppress(Ended):
            if (seen := at(controller)) is not None:
                found.append((controller, seen))
    chosen = choose([seen for _, seen in found], run)
    return lambda: at(found[chosen][0])


def choose(jobs: list[Seen], run: str | None) -> int:
    """Which of the jobs is meant.

    Raises:
        UsageError: none is, or more than one.
    """
    fitting = [at for at, seen in enumerate(jobs) if run is None or run in (seen["name"], seen["run_dir"])]
    if len(fitting) == 1:
        return fitting[0]
    names = ", ".join(f"{seen['name']} ({seen['run_dir']})" for seen in jobs)
    if not jobs:
        raise UsageError("no job runs in this cluster; of one that is over, give the run directory")
    if not fitting:
        raise UsageError(f"no job {run!r} runs in this cluster, and there is no such folder; running: {names}")
    raise UsageError(f"more than one job runs in this cluster; name one, or its run directory: {names}")
