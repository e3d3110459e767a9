"""Finding the jobs of a cluster, and looking at them, from any process that is connected to it."""

from __future__ import annotations

import contextlib
from typing import Any

import ray
from ray.util import list_named_actors

from planaria.control.ticket import CONTROLLER, PREFIX

ANSWER_S = 10.0
"""A controller that has not answered by then is busy coming back, or gone."""


def controllers() -> list[Any]:
    """Handles of all controllers in the cluster, in the order of their namespaces."""
    named: Any = list_named_actors(all_namespaces=True)
    found = []
    for space in sorted(r["namespace"] for r in named if r["name"] == CONTROLLER and r["namespace"].startswith(PREFIX)):
        with contextlib.suppress(ValueError):  # it ended meanwhile
            found.append(ray.get_actor(CONTROLLER, space))
    return found


def look(controller: Any) -> dict[str, Any] | None:
    """What the controller shows; None if it does not answer now, as while Ray starts it anew.

    Raises:
        RayActorError: it has ended for good.
    """
    try:
        seen: dict[str, Any] = ray.get(controller.look.options(concurrency_group="talk").remote(), timeout=ANSWER_S)
    except (ray.exceptions.GetTimeoutError, ray.exceptions.ActorUnavailableError):
        return None
    return seen
