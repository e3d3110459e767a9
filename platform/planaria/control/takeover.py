"""What a new submission does about an earlier one into the same run directory that still lives."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

import ray
from ray.util import list_named_actors

from planaria.control.ticket import CONTROLLER, prefix

STOP_S = 120.0
"""Longest wait for an earlier submission to end with a checkpoint."""
POLL_S = 0.2
log = logging.getLogger(__name__)


def take_over(run_dir: str) -> None:
    """End earlier submissions into ``run_dir``, with a checkpoint where their controller still answers."""
    for namespace in sorted({row["namespace"] for row in _named(prefix(run_dir))}):
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            controller: Any = ray.get_actor(CONTROLLER, namespace)
            log.warning("an earlier submission of this run is still running; it is asked to end with a checkpoint")
            stop = controller.stop.options(concurrency_group="talk").remote("taken over by a new submission")
            ray.get(stop, timeout=STOP_S)
            deadline = time.monotonic() + STOP_S
            while time.monotonic() < deadline and _running(controller):
                time.sleep(POLL_S)
        sweep(namespace)


def sweep(namespace: str) -> None:
    """End every process of a submission that still lives."""
    # The controller first: it would replace the others.
    for row in sorted(_named(namespace), key=lambda row: row["name"] != CONTROLLER):
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            ray.kill(ray.get_actor(row["name"], row["namespace"]), no_restart=True)


def _running(controller: Any) -> bool:
    with contextlib.suppress(ray.exceptions.RayError):
        status = ray.get(controller.status.options(concurrency_group="talk").remote(), timeout=POLL_S * 10)
        return status["state"] not in ("finished", "stopped", "failed")
    return False


def _named(namespaces: str) -> list[dict[str, str]]:
    """Named actors in namespaces that begin so."""
    named: Any = list_named_actors(all_namespaces=True)
    return [row for row in named if row["namespace"].startswith(namespaces)]
