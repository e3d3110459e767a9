"""The part of Ray's job API that is used here, and how it is reached."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, MutableMapping
from pathlib import Path
from typing import Any, Protocol

from planaria.commands.failures import UsageError


class Jobs(Protocol):
    """``ray.job_submission.JobSubmissionClient``, as far as it is used."""

    def submit_job(
        self, *, entrypoint: str, submission_id: str, runtime_env: dict[str, Any], metadata: dict[str, str]
    ) -> str: ...

    def get_job_info(self, job_id: str) -> Any: ...

    def get_job_logs(self, job_id: str) -> str: ...

    def tail_job_logs(self, job_id: str) -> AsyncIterator[str]: ...

    def stop_job(self, job_id: str) -> bool: ...


def reach(address: str | None) -> Jobs:
    """Client of the cluster at ``address``.

    Args:
        address: of the dashboard, e.g. ``http://127.0.0.1:8265``; None: ``RAY_API_SERVER_ADDRESS``, ``RAY_ADDRESS``,
            or a cluster on this machine.

    Raises:
        UsageError: nobody answers there, or the token is missing or wrong.
    """
    use_token(os.environ)  # before Ray is imported, which reads it once
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    # Its remarks on packages and sockets would stand between the lines of the job.
    for name in ("dashboard.modules.dashboard_sdk", "dashboard.modules.job.sdk", "_private.runtime_env.packaging"):
        logging.getLogger(f"ray.{name}").setLevel(logging.WARNING)
    try:
        client: Jobs = JobSubmissionClient(address)
    except AuthenticationError as error:
        raise UsageError(
            f"the cluster wants its token ({str(error).splitlines()[0]}); set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
        ) from None
    except (ConnectionError, ValueError, RuntimeError) as error:
        where = f"at {address}" if address else "at RAY_ADDRESS or on this machine"
        raise UsageError(
            f"no Ray cluster takes jobs {where} ({str(error).splitlines()[0]}); give the address of its dashboard: "
            "--address http://HOST:8265"
        ) from None
    return client


def use_token(environment: MutableMapping[str, str]) -> None:
    """Show a token that is at hand, unless ``RAY_AUTH_MODE`` says what to do.

    A first ``ray.init()`` leaves a token in the home directory, and every later ``ray start`` wants it; Ray's client of
    the job API alone does not look for it by itself.
    """
    if "RAY_AUTH_MODE" in environment:
        return
    file = environment.get("RAY_AUTH_TOKEN_PATH") or str(Path(environment.get("HOME", "~")) / ".ray" / "auth_token")
    if environment.get("RAY_AUTH_TOKEN") or Path(file).expanduser().is_file():
        environment["RAY_AUTH_MODE"] = "token"


def unreachable() -> tuple[type[Exception], ...]:
    """What a call raises while the head or the way to it is gone; also what the head says while it starts."""
    import aiohttp
    import requests

    return (requests.exceptions.RequestException, aiohttp.ClientError, RuntimeError, OSError)
