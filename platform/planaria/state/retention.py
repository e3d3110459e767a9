"""Which folders may go once a checkpoint is durable. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from planaria.state.names import FolderName, newest_first


def removable(
    names: Iterable[FolderName],
    keep_last: int,
    token: str,
    intact: Callable[[FolderName], bool],
    keep_every: int | None = None,
    upto: int | None = None,
) -> list[FolderName]:
    """Folders that are no longer needed, newest first.

    Walks from the newest checkpoint down until ``keep_last`` intact ones are found; what is older goes.
    Damaged ones do not count, so the last intact one never goes. Nor does one whose step is a multiple of
    ``keep_every``, whatever its age or state. A replaced folder goes once the
    checkpoint of the same step is intact. Leftovers of other tokens than ``token`` go if their step is at most
    ``upto`` (the step that was committed; ``None``: whatever it is): one of a later step may be the attempt of a
    newer generation, which is being written while the last one of an older generation is committed.

    ``intact`` may be expensive: it is asked only where the answer can remove something.
    """
    names = list(names)
    gone = [
        name
        for name in names
        if name.kind == "gone" or (name.kind == "tmp" and name.token != token and (upto is None or name.step <= upto))
    ]
    visible = newest_first(names)
    steps = Counter(name.step for name in visible)
    if len(steps) == len(visible) <= keep_last:
        return gone
    kept: set[int] = set()
    enough = 0
    for name in visible:
        milestone = keep_every is not None and name.step % keep_every == 0
        if name.step in kept or (enough >= keep_last and not milestone):
            gone.append(name)
        elif enough >= keep_last and steps[name.step] == 1:
            continue  # nothing hangs on its state
        elif intact(name):
            enough += 1
            kept.add(name.step)
    return gone
