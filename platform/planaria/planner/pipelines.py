"""How many pipeline stages, and which groups of workers take which. Pure.

A group is what works on one stage of one replica together: the ranks of one tensor- and context-parallel group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Group = tuple[str, ...]


def usable(groups: int, pp: int, global_batch: int) -> int:
    """How many of ``groups`` a layout with ``pp`` stages occupies: at most one replica per sample."""
    return min(groups // pp, global_batch) * pp


def degree(preferred: int, groups: int, global_batch: int, current: int | None) -> int:
    """The largest divisor of ``preferred`` for which there are groups, as of tensor parallelism: a degree is
    configured because a model needs it.

    A ``current`` one that has fallen stays as long as it uses more groups.
    """
    pp = max(d for d in range(1, min(preferred, groups) + 1) if preferred % d == 0)
    if current is None or preferred % current or current > groups:
        return pp
    return current if usable(groups, pp, global_batch) < usable(groups, current, global_batch) else pp


def by_stage(groups: Sequence[Group], pp: int, replicas: int, before: Mapping[str, int], world: int) -> list[Group]:
    """The groups that take part, those of the first stage first.

    Groups come node by node, so stages lie on different nodes where these are large enough: one message per
    micro-batch passes between stages, while data-parallel ranks of a stage exchange all their gradients.

    Args:
        groups: at least ``pp * replicas``, in the order of their nodes.
        before: rank of each worker that had one in a layout of ``world`` ranks with the same ``pp``; empty if there
            was none. A group keeps the stage of its first survivor where it can, since its state belongs there.
    """
    if pp == 1 or not before:
        return list(groups[: pp * replicas])
    rank_of = {group: next((before[worker] for worker in group if worker in before), world) for group in groups}
    stages: list[list[Group]] = [[] for _ in range(pp)]
    rest: list[Group] = []
    for group in sorted(groups, key=rank_of.__getitem__):  # stable: newcomers stay in the order of their nodes
        stage = rank_of[group] * pp // world
        if stage < pp and len(stages[stage]) < replicas:
            stages[stage].append(group)
        else:
            rest.append(group)
    for members in stages:
        missing = replicas - len(members)
        members += rest[:missing]
        del rest[:missing]
    return [group for members in stages for group in members]
