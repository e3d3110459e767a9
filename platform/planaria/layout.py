"""The parallel layout: which rank sits where on which mesh axis.

A :class:`Layout` is a pure value. It knows nothing of torch or Ray, so that planners, tests and
the checkpoint index can reason about layouts in microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes, slowest-varying first: the last axis has neighbouring ranks, hence the fastest links."""


class LayoutError(ValueError):
    """A layout that cannot exist; the message says which degree is wrong and what would be right."""


@dataclass(frozen=True, order=True)
class Layout:
    """Degrees of the five mesh axes. Their product is the world size.

    ``dp_replicate`` keeps whole copies (DDP / the replicate part of HSDP); ``dp_shard`` shards
    parameters, gradients and optimizer state (FSDP2); ``tp`` splits heads and FFN columns, and
    carries sequence parallelism. ``pp`` and ``cp`` are pipeline and context parallelism.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            degree = getattr(self, field.name)
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise LayoutError(f"layout degree {field.name}={degree!r} must be an integer of at least 1")

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(self.degrees)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Degrees in the order of :data:`AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def dp(self) -> int:
        """Number of data-parallel replicas: how many ways the global batch is cut."""
        return self.dp_replicate * self.dp_shard

    def coords(self, rank: int) -> dict[str, int]:
        """Position of ``rank`` on every axis."""
        if not 0 <= rank < self.world:
            raise LayoutError(f"rank {rank} is outside a world of {self.world} ({self})")
        position: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, position[axis] = divmod(rank, getattr(self, axis))
        return position

    def rank(self, **coords: int) -> int:
        """Rank at the given coordinates; axes that are left out count as 0."""
        self._check_axes(coords)
        rank = 0
        for axis in AXES:
            degree, position = getattr(self, axis), coords.get(axis, 0)
            if not 0 <= position < degree:
                raise LayoutError(f"{axis}={position} is outside 0..{degree - 1}")
            rank = rank * degree + position
        return rank

    def dp_rank(self, rank: int) -> int:
        """Which data-parallel replica ``rank`` belongs to: the index of its slice of the batch."""
        at = self.coords(rank)
        return at["dp_replicate"] * self.dp_shard + at["dp_shard"]

    def speaks_for_replica(self, rank: int) -> bool:
        """Whether ``rank`` is the first of those that share one slice of the batch: what they all know counts once."""
        at = self.coords(rank)
        return at["pp"] == at["cp"] == at["tp"] == 0

    def groups(self, *axes: str) -> Iterator[list[int]]:
        """Rank lists of the process groups that span ``axes`` (one list per group, ranks in order)."""
        self._check_axes(axes)
        seen: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            at = self.coords(rank)
            key = tuple(at[axis] for axis in AXES if axis not in axes)
            seen.setdefault(key, []).append(rank)
        yield from seen.values()

    @staticmethod
    def _check_axes(names: Iterable[str]) -> None:
        unknown = [name for name in names if name not in AXES]
        if unknown:
            raise LayoutError(f"no such mesh axis: {', '.join(unknown)}; axes are {', '.join(AXES)}")

    def __str__(self) -> str:
        parts = [f"{axis}{getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        return "x".join(parts) or "single"

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Inverse of ``str``: ``"dp_shard2xtp2"`` or ``"single"``."""
        if text == "single":
            return cls()
        degrees: dict[str, int] = {}
        for part in text.split("x"):
            axis = part.rstrip("0123456789")
            if axis not in AXES or axis in degrees or axis == part:
                raise LayoutError(f"cannot read {part!r} in layout {text!r}; axes are {', '.join(AXES)}")
            degrees[axis] = int(part[len(axis) :])
        return cls(**degrees)
