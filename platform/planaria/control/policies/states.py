"""The job's states and the transitions between them, as data.

``docs/architecture.md`` draws the same table; a test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class State(StrEnum):
    """Stations of a job."""

    WAITING = "waiting"
    FORMING = "forming"
    RUNNING = "running"
    RECOVERING = "recovering"
    RESIZING = "resizing"
    DRAINING = "draining"
    STOPPING = "stopping"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


INITIAL = State.WAITING
FINAL = frozenset({State.FINISHED, State.STOPPED, State.FAILED})


class IllegalTransition(RuntimeError):
    """A transition that the table does not hold: a bug of the controller."""


_W, _F, _R, _C = State.WAITING, State.FORMING, State.RUNNING, State.RECOVERING
_Z, _D, _S = State.RESIZING, State.DRAINING, State.STOPPING

TRANSITIONS: Mapping[tuple[State, State], str] = MappingProxyType(
    {
        (_W, _F): "enough workers, the data opened",
        (_W, _R): "a controller that returned adopts the generation that trains",
        (_W, State.STOPPED): "asked to stop while none trained",
        (_W, State.FAILED): "too few within elastic.wait_s",
        (_F, _R): "first step done",
        (_F, _C): "a member lost while forming",
        (_F, _S): "Ctrl-C, SIGTERM, stop()",
        (_F, State.FINISHED): "nothing was left to do",
        (_F, State.FAILED): "no legal layout, or no intact checkpoint",
        (_R, _C): "a member lost, silent, hung or failed",
        (_R, _Z): "other workers, or more of them, are to have the ranks",
        (_R, _D): "a notice: nodes leave before their deadline",
        (_R, _S): "Ctrl-C, SIGTERM, stop()",
        (_R, State.FINISHED): "all steps done",
        (_R, State.FAILED): "another controller has taken over",
        (_Z, _F): "all paused at one step boundary, state in memory",
        (_Z, _W): "fewer than min_workers left meanwhile",
        (_Z, _C): "a member lost meanwhile",
        (_Z, _S): "Ctrl-C, SIGTERM, stop()",
        (_Z, State.FINISHED): "the last step was under way",
        (_Z, State.STOPPED): "asked to stop while none trained",
        (_Z, State.FAILED): "another controller has taken over",
        (_D, _F): "all paused at one step boundary, nodes released",
        (_D, _W): "fewer than min_workers left, state durable",
        (_D, _C): "a member lost meanwhile",
        (_D, _S): "Ctrl-C, SIGTERM, stop()",
        (_D, State.FINISHED): "the last step was under way",
        (_D, State.STOPPED): "asked to stop while none trained",
        (_D, State.FAILED): "another controller has taken over",
        (_C, _F): "the rest have returned",
        (_C, _W): "fewer than min_workers left",
        (_C, State.STOPPED): "asked to stop while none trained",
        (_C, State.FAILED): "failures without progress exceed the budget",
        (_S, _F): "all had paused before they heard of it: once more, to save",
        (_S, State.STOPPED): "checkpoint at the step boundary",
        (_S, State.FINISHED): "the last step was under way",
        (_S, _C): "a member lost meanwhile",
        (_S, State.FAILED): "the last state cannot be saved",
    }
)
"""Legal transitions with their usual causes, for people."""


def check(before: State, after: State) -> None:
    """Raise where a job must not go from ``before`` to ``after``; to stay is legal.

    Raises:
        IllegalTransition: the table does not hold it; the message lists what it does hold.
    """
    if before is after or (before, after) in TRANSITIONS:
        return
    legal = ", ".join(to.value for start, to in TRANSITIONS if start is before)
    raise IllegalTransition(f"{before.value} to {after.value} is no transition; from {before.value}: {legal or 'none'}")


def mermaid() -> list[str]:
    """The table in the syntax of a mermaid state diagram, one transition per line."""
    return [f"[*] --> {INITIAL.value}"] + [
        f"{before.value} --> {after.value}: {cause}" for (before, after), cause in TRANSITIONS.items()
    ]
