"""Which rank stores a slice that several ranks hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def is_writer(coords: Mapping[str, int], replicated_axes: Iterable[str]) -> bool:
    """Whether the rank at ``coords`` stores a slice that is replicated over ``replicated_axes``.

    Ranks that differ only on these axes hold the same slice; exactly one of them, the one at 0 on
    each, writes it. ``coords`` is what ``Layout.coords(rank)`` gives.

    Raises:
        ValueError: an axis that ``coords`` does not have.
    """
    axes = tuple(replicated_axes)
    if unknown := [axis for axis in axes if axis not in coords]:
        raise ValueError(f"unknown mesh axes {', '.join(unknown)}; this mesh has {', '.join(coords)}")
    return all(coords[axis] == 0 for axis in axes)
