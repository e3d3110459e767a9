"""``planaria train``: run one job on a Ray cluster, and tell its outcome truly."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from planaria.commands.failures import FAILED, INTERRUPTED, TERMINATED, UsageError, complain
from planaria.config import JobConfig, load

if TYPE_CHECKING:
    from rich.console import Console


def train(config: str, overrides: Sequence[str], address: str | None, package: str | None = None) -> int:
    """Run the job to its end; the exit code says how it ended.

    Args:
        config: YAML file.
        overrides: ``key=value`` pairs.
        address: of the Ray cluster; None: ``RAY_ADDRESS``, a cluster that runs on this machine, or a new local one.
        package: folder of this package where it is not installed, to be sent to the workers.
    """
    from rich.console import Console

    return run(load(config, overrides), Console(highlight=False), address, package)


def run(job: JobConfig, console: Console, address: str | None = None, package: str | None = None) -> int:
    """Like :func:`train`, for a job that has been read."""
    from planaria.observe.view import LiveView, print_summary

    view = LiveView(job.name, console)
    with ExitStack() as stack:
        with view:
            from planaria.trainer import ElasticTrainer, TrainingFailed, TrainingStopped

            trainer = ElasticTrainer(job, watch=view)
            if address is not None or package is not None:
                trainer.preflight()
                stack.callback(connect(address, package))
            trouble: TrainingFailed | TrainingStopped | None = None
            try:
                trainer.fit()
            except (TrainingFailed, TrainingStopped) as error:
                trouble = error
        if trainer.summary:
            print_summary(console, job.name, trainer.summary)
    if trouble is None:
        return 0
    # The reason last: of a job that failed, Ray shows the last lines.
    if isinstance(trouble, TrainingFailed) and (trace := trainer.summary.get("trace")):
        complain(f"the error below came from\n{trace}")
    complain(str(trouble))
    return FAILED if isinstance(trouble, TrainingFailed) else stop_code(trouble.by)


def connect(address: str | None, package: str | None) -> Any:
    """Connect to Ray; returns the function that disconnects."""
    import logging

    import ray

    environment = {"py_modules": [package]} if package is not None else None
    try:
        ray.init(address=address, runtime_env=environment, logging_level=logging.WARNING, log_to_driver=False)
    except (ConnectionError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise UsageError(f"cannot connect to Ray at {address or 'this machine'}: {first}") from None
    return ray.shutdown


def stop_code(by: str | None) -> int:
    """130 for a run that Ctrl-C ended, 143 for SIGTERM."""
    return TERMINATED if by == "SIGTERM" else INTERRUPTED
