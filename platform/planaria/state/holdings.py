"""Who holds which box of a tensor, in any layout. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from planaria.layout import AXES, Layout, LayoutError
from planaria.state.boxes import Box, shard_rows, split_dim


def held_box(
    global_shape: Sequence[int], tp_dim: int | None, stage: int | None, layout: Layout, rank: int
) -> Box | None:
    """What ``rank`` holds of a tensor; None where it holds nothing, as its pipeline stage has no such tensor.

    The tensor-parallel part is cut first, then FSDP2 cuts its rows, of which trailing ranks may get none: an empty
    box. Scalars are whole everywhere, since they have no rows.

    Args:
        global_shape: shape of the whole tensor.
        tp_dim: dim that tensor parallelism splits evenly, or None where all its ranks hold the same.
        stage: position on the axis ``pp`` that owns the tensor, or None if all do.

    Raises:
        LayoutError: there is no such stage or rank.
        BoxError: ``tp_dim`` cannot be split evenly.
    """
    if stage is not None and not 0 <= stage < layout.pp:
        raise LayoutError(f"pipeline stage {stage} is outside 0..{layout.pp - 1} ({layout})")
    at = layout.coords(rank)
    if stage is not None and at["pp"] != stage:
        return None
    part = Box.whole(global_shape) if tp_dim is None else split_dim(global_shape, tp_dim, at["tp"], layout.tp)
    return shard_rows(part.shape, at["dp_shard"], layout.dp_shard).within(part) if global_shape else part


def replicated_axes(global_shape: Sequence[int], tp_dim: int | None, stage: int | None) -> frozenset[str]:
    """Axes on which ranks may differ and still hold the very same box: the arguments are those of :func:`held_box`.

    Of the ranks on one pipeline stage ``pp`` is not such an axis: the other stages hold nothing.
    """
    return frozenset(
        ("dp_replicate", "cp")
        + (("tp",) if tp_dim is None else ())
        + (("pp",) if stage is None else ())
        + (() if global_shape else ("dp_shard",))
    )


def holders(layout: Layout, rank: int, replicated_axes: Iterable[str]) -> list[int]:
    """Ranks that differ from ``rank`` on ``replicated_axes`` only, itself included, in order.

    Raises:
        LayoutError: no such rank or axis.
    """
    axes = set(replicated_axes)
    if unknown := axes.difference(AXES):
        raise LayoutError(f"no such mesh axis: {', '.join(sorted(unknown))}; axes are {', '.join(AXES)}")
    at = layout.coords(rank)
    positions = [range(getattr(layout, axis)) if axis in axes else (at[axis],) for axis in AXES]
    return [layout.rank(**dict(zip(AXES, place, strict=True))) for place in itertools.product(*positions)]
