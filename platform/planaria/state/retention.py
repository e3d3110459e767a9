"""Which folders may go once a checkpoint is durable. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from planaria.state.names import FolderName, newest_first


def removable(
    names: Iterable[FolderName], keep_last: int, token: str, intact: Callable[[FolderName], bool]
) -> list[FolderName]:
    """Folders that are no longer needed, newest first.

    Walks from the newest checkpoint down until ``keep_last`` intact ones are found; what is older goes.
    Damaged ones do not count, so the last intact one never goes. A replaced folder goes once the
    checkpoint of the same step is intact. Leftovers of other tokens than ``token`` go at once: their
    writers are of an earlier generation.

    ``intact`` may be expensive: it is asked only where the answer can remove something.
    """
    names = list(names)
    gone = [name for name in names if name.kind == "gone" or (name.kind == "tmp" and name.token != token)]
    visible = newest_first(names)
    if len({name.step for name in visible}) == len(visible) <= keep_last:
        return gone
    kept: set[int] = set()
    for name in visible:
        if len(kept) >= keep_last or name.step in kept:
            gone.append(name)
        elif intact(name):
            kept.add(name.step)
    return gone
