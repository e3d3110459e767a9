"""What a submission consists of: command, files, environment, metadata. Pure but for the copying of files."""

from __future__ import annotations

import re
import secrets
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

JOB_FILE = "job.yaml"
STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
"""Seconds between SIGTERM and SIGKILL when a job is stopped; Ray reads it from the job's environment."""
STOP_WAIT_S = 150
"""Longer than the driver waits for the last checkpoint (two minutes). Ray's own 3 s are too few for a large model."""
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Order:
    """One submission."""

    ident: str
    entrypoint: str
    variables: dict[str, str]
    metadata: dict[str, str] = field(default_factory=dict)


def make_order(
    text: str,
    overrides: Sequence[str],
    environment: Mapping[str, str],
    given: Mapping[str, str],
    *,
    name: str,
    python: str = "python",
    metadata: Mapping[str, str] | None = None,
    ident: str | None = None,
) -> Order:
    """Order of a training job.

    Args:
        text: of the job file; variables that it mentions go along where ``environment`` has them, so that it means
            on the cluster what it means here.
        overrides: ``key=value`` pairs, passed on.
        environment: of the submitting process.
        given: variables that the job is to have whatever ``environment`` says.
        name: run name, the readable part of the submission's id.
        python: interpreter on the head node.
        ident: of the submission; default: drawn here and not by the head, so that a submission whose answer was lost
            can be recognised and is not made twice.
    """
    mentioned = {found for found in _VARIABLE.findall("\n".join([text, *overrides])) if environment.get(found)}
    variables = {STOP_WAIT: str(STOP_WAIT_S)} | {key: environment[key] for key in sorted(mentioned)} | dict(given)
    sets = [part for override in overrides for part in ("--set", override)]
    return Order(
        ident=ident or f"{name}-{secrets.token_hex(4)}",
        entrypoint=shlex.join([python, "-m", "planaria", "train", JOB_FILE, *sets]),
        variables=variables,
        metadata={"run": name} | dict(metadata or {}),
    )


def pack(package: Path, job_file: Path, folder: Path) -> int:
    """Copy the package and the job file into ``folder``, the job's working directory; returns its size in bytes.

    Nothing else travels: neither data nor runs that lie beside the job file. The package goes along so that the
    cluster runs this version of it, whatever its image holds; it takes precedence in driver and actors.
    """
    shutil.copytree(package, folder / "planaria", ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    shutil.copyfile(job_file, folder / JOB_FILE)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def parse_variables(pairs: Sequence[str]) -> dict[str, str]:
    """``NAME=value`` pairs as a mapping.

    Raises:
        ValueError: a pair without a name, or without ``=``.
    """
    found = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not _NAME.fullmatch(name):
            raise ValueError(f"--env {pair}: expected NAME=VALUE, e.g. --env AWS_ENDPOINT_URL=http://minio:9000")
        found[name] = value
    return found


def named(text: str) -> str | None:
    """Run name in the text of a job file that is not checked here; None if it says none."""
    tree = yaml.safe_load(text)
    name = tree.get("name") if isinstance(tree, dict) else None
    return name if isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) else None
