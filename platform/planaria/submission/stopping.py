"""The end of a submission on request."""

from __future__ import annotations

from planaria.submission.jobs import Jobs, unreachable
from planaria.submission.watching import OVER, PAUSE_S, Patience, info, status_of


def stop_and_wait(jobs: Jobs, ident: str, limit_s: float, patience: Patience) -> str | None:
    """Ask a submission to end and wait until it has; its last status, or None if it has not within ``limit_s``.

    Raises:
        HeadLost, NoSuchJob.
    """
    deadline = patience.clock() + limit_s
    heard = False
    while True:
        status = status_of(info(jobs, ident, patience))
        if status in OVER:
            return status
        if not heard:
            # Ray says yes to the end of a job that has not started, and starts it all the same: it is asked again.
            try:
                jobs.stop_job(ident)
            except unreachable() as error:
                patience.failed(error)
                continue
            heard = status == "RUNNING"
        if patience.clock() >= deadline:
            return None
        patience.sleep(PAUSE_S)
