"""Who takes the place of a lost worker: a warm standby of its node, else a spare elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Where a replacement comes from."""

    STANDBY = "standby"
    """An idle process of the same node, with the lost one's share of its devices."""
    SPARE = "spare"
    """A worker that has devices of its own but no rank."""


@dataclass(frozen=True)
class Place:
    """``by`` takes the place of ``lost``."""

    lost: str
    by: str
    node: str
    """Where ``by`` is."""
    kind: Kind


@dataclass(frozen=True)
class Promotion:
    """Who replaces whom."""

    places: tuple[Place, ...]
    vacant: tuple[str, ...]
    """Lost members that nobody replaces: the layout shrinks, or a process is started."""


def promote(
    lost: Mapping[str, Sequence[str]],
    standbys: Mapping[str, Sequence[str]],
    spares: Mapping[str, Sequence[str]],
) -> Promotion:
    """Choose replacements. The same input in any order of nodes gives the same choice.

    Standbys come first, since they restore what the node had: its snapshots are at hand and its tensor-parallel
    group stays on one node. A standby cannot serve another node: devices do not move. Then spares: those of the
    same node, then those of the node that has the most left, so that a tensor-parallel group finds room together.

    Args:
        lost: lost members by node. A node that is gone is named with its members and has neither standby nor spare.
        standbys: ready standbys by node, in the order in which to use them.
        spares: ready workers without a rank by node; leave out nodes under notice, suspicion or quarantine.
    """
    places: list[Place] = []
    open_: list[tuple[str, str]] = []
    reserve = {node: list(members) for node, members in sorted(spares.items()) if members}
    for node in sorted(lost):
        ready = list(standbys.get(node, ()))
        for member in lost[node]:
            if ready:
                places.append(Place(member, ready.pop(0), node, Kind.STANDBY))
            else:
                open_.append((node, member))

    vacant: list[tuple[str, str]] = []
    for node, member in open_:
        if reserve.get(node):
            places.append(Place(member, reserve[node].pop(0), node, Kind.SPARE))
        else:
            vacant.append((node, member))
    # Nodes with the most spares first; a node is emptied before the next one is touched.
    pool = [
        (node, spare)
        for node, members in sorted(reserve.items(), key=lambda item: (-len(item[1]), item[0]))
        for spare in members
    ]
    places += [
        Place(member, spare, where, Kind.SPARE) for (_, member), (where, spare) in zip(vacant, pool, strict=False)
    ]
    return Promotion(tuple(places), tuple(member for _, member in vacant[len(pool) :]))
