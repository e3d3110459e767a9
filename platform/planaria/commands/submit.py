"""``planaria submit`` and ``planaria stop``: training jobs through Ray's job API."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import planaria
from planaria.commands.failures import FAILED, INTERRUPTED, TERMINATED, UsageError, complain
from planaria.config import ConfigError, load
from planaria.paths import relative_paths
from planaria.submission.jobs import Jobs, reach, unreachable
from planaria.submission.order import Order, make_order, named, pack, parse_variables
from planaria.submission.stopping import stop_and_wait
from planaria.submission.watching import End, HeadLost, NoSuchJob, Patience, last_log, watch

START_PATIENCE_S = 60.0
"""A head takes jobs only some time after its dashboard has come up."""
LAST_LINES = 12


def submit(
    config: str,
    overrides: Sequence[str],
    address: str | None,
    *,
    wait: bool = True,
    follow: bool = True,
    check: bool = True,
    variables: Sequence[str] = (),
    python: str = "python",
    ident: str | None = None,
) -> int:
    """Submit a training job; with ``wait`` the exit code is the job's own.

    Args:
        config: YAML file.
        overrides: ``key=value`` pairs.
        address: of the cluster's dashboard; None: ``RAY_API_SERVER_ADDRESS``, ``RAY_ADDRESS`` or this machine's.
        wait: whether to stay until the job has ended.
        follow: whether to print its log meanwhile.
        check: whether to read the job file here first.
        variables: ``NAME=value`` pairs for the job's environment.
        python: interpreter on the head node.
        ident: submission id; default: drawn.

    Raises:
        ConfigError: the job file, before anything is sent.
        UsageError: no cluster, or it refuses the job.
    """
    try:
        given = parse_variables(variables)
    except ValueError as error:
        raise UsageError(str(error)) from None
    order = _order(config, overrides, given, check, python, ident)
    jobs = reach(address)
    with tempfile.TemporaryDirectory(prefix="planaria-submit-") as folder:
        size = pack(Path(planaria.__file__).parent, Path(config), Path(folder))
        send(jobs, order, {"working_dir": folder, "env_vars": order.variables}, Patience(START_PATIENCE_S))
    at = f" --address {address}" if address else ""
    _say(f"submitted {order.ident} (this version of planaria and the job file: {size / 1e6:.1f} MB before packing)")
    _say(f"to end it with a checkpoint: planaria stop {order.ident}{at}")
    return await_end(jobs, order.ident, follow, Patience()) if wait else 0


def stop(ident: str, address: str | None, wait_s: float) -> int:
    """Ask a submission to end at its next step, with a checkpoint, and wait until it has.

    Raises:
        UsageError: no such submission, or no cluster.
    """
    jobs, patience = reach(address), Patience(wait_s)
    try:
        status = stop_and_wait(jobs, ident, wait_s, patience)
    except NoSuchJob as error:
        raise UsageError(str(error)) from None
    except HeadLost as error:
        complain(str(error))
        return FAILED
    log = last_log(jobs, ident).rstrip()
    if log:
        print("\n".join(log.splitlines()[-LAST_LINES:]))
    if status is None:
        complain(f"{ident} has not ended within {wait_s:.0f} s; it was asked to, and may still")
        return FAILED
    _say(f"{ident}: {status.lower()}")
    return 0


def _order(
    config: str, overrides: Sequence[str], given: Mapping[str, str], check: bool, python: str, ident: str | None
) -> Order:
    metadata = {"planaria": planaria.__version__, "config": Path(config).name}
    if check:
        before = dict(os.environ)
        os.environ.update(given)
        try:
            job = load(config, overrides)
        finally:
            for key in given:
                os.environ.pop(key)
            os.environ.update(before)
        if astray := relative_paths(job):
            raise ConfigError(
                "\n".join(
                    f"{config}: {key}: {value!r} is relative, and a submitted job works in a temporary folder of the "
                    f"cluster; give a path that all nodes see: --set {key}=/shared/..."
                    for key, value in astray.items()
                )
            )
        name = job.name
        metadata |= {"steps": str(job.train.steps), "run_dir": str(Path(job.storage) / job.name)}
    try:
        text = Path(config).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{config}: cannot be read: {error}") from None
    if not check:
        name = named(text) or "planaria"
    return make_order(text, overrides, os.environ, given, name=name, python=python, metadata=metadata, ident=ident)


def send(jobs: Jobs, order: Order, environment: dict[str, Any], patience: Patience) -> None:
    """Submit, once.

    Raises:
        UsageError: the cluster refuses the job, or its head does not take jobs for too long.
    """
    while True:
        try:
            jobs.submit_job(
                entrypoint=order.entrypoint,
                submission_id=order.ident,
                runtime_env=environment,
                metadata=order.metadata,
            )
            return
        except unreachable() as error:
            if is_refusal(error):
                raise UsageError(f"the cluster refuses the job: {_first_line(error)}") from None
            # Its answer may have been lost: a second submission under the same id would be refused.
            if _is_there(jobs, order.ident):
                return
            try:
                patience.failed(error)
            except HeadLost:
                raise UsageError(f"the cluster takes no jobs: {_first_line(error)}") from None


def is_refusal(error: Exception) -> bool:
    """Whether the head understood and said no, so that asking again is no use."""
    text = str(error)
    return "status code 4" in text or "already exists" in text


def _is_there(jobs: Jobs, ident: str) -> bool:
    try:
        jobs.get_job_info(ident)
    except unreachable():
        return False
    return True


def await_end(jobs: Jobs, ident: str, follow: bool, patience: Patience) -> int:
    """Wait for the end; the exit code is the driver's, 143 if the job was stopped, 1 where Ray knows no code."""
    try:
        end = watch(jobs, ident, _write if follow else None, patience)
    except KeyboardInterrupt:
        complain(f"no longer watching; {ident} goes on (planaria stop {ident} ends it with a checkpoint)")
        return INTERRUPTED
    except (HeadLost, NoSuchJob) as error:
        complain(str(error))
        return FAILED
    return report(ident, end, brief=follow)


def report(ident: str, end: End, brief: bool) -> int:
    """Say how a submission ended; its exit code. Ray's own command exits with 1 for every failure, 0 for a stop.

    ``brief``: the log stands above, and Ray's message would repeat its end.
    """
    if end.status == "SUCCEEDED":
        _say(f"{ident}: succeeded")
        return 0
    if end.status == "STOPPED":
        _say(f"{ident}: stopped")
        return TERMINATED
    code = f" with exit code {end.code}" if end.code is not None else ""
    message = end.message.strip() or "Ray says no more"
    # Without a code the driver never ran, and the message is all there is.
    why = "the lines above say why" if brief and end.code is not None else message
    complain(f"{ident}: failed{code}; {why}")
    # A driver that a signal ended has a negative code there; a shell would say 128 + the signal.
    return FAILED if not end.code else end.code if end.code > 0 else 128 - end.code


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _say(text: str) -> None:
    print(text, flush=True)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
