"""Which node keeps a copy of whose slices. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from planaria.memory.table import Table


def partners(holders: Sequence[str], own: str, ring: Sequence[str], replicas: int) -> list[str]:
    """Nodes that need a copy of a slice so that ``replicas + 1`` nodes hold it, or as many as there are.

    Args:
        holders: nodes that hold it anyway, as data-parallel duplicates do.
        own: node that sends the copies.
        ring: all nodes that can keep copies, in an order that is the same everywhere; each node sends to those
            that follow it, so that every node keeps about as much as it sends.
        replicas: copies wanted beside the original.
    """
    missing = replicas + 1 - len({*holders, own})
    start = ring.index(own) + 1 if own in ring else 0
    order = [*ring[start:], *ring[:start]]
    return [node for node in order if node != own and node not in holders][: max(0, missing)]


def shipments(table: Table, own: str, ring: Sequence[str], replicas: int) -> dict[str, list[int]]:
    """Entries that each partner node is to be sent, by index into the table."""
    found: dict[str, list[int]] = {}
    known: dict[tuple[str, ...], list[str]] = {}
    for index, entry in enumerate(table.entries):
        if entry.lead:
            if entry.nodes not in known:
                known[entry.nodes] = partners(entry.nodes, own, ring, replicas)
            for node in known[entry.nodes]:
                found.setdefault(node, []).append(index)
    return found


def duty(ranks: Sequence[int], rank: int, nodes: Sequence[str]) -> tuple[bool, bool]:
    """(keeps it in memory?, writes it to checkpoints and has it copied?) for one of the ``ranks`` that hold a slice.

    On every node the first rank keeps the slice for all; over all nodes the first one writes and copies it.
    """
    first_here = min(other for other in ranks if nodes[other] == nodes[rank])
    return rank == first_here, rank == min(ranks)
