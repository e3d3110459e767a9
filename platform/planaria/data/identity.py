"""Which data set a run reads: enough to notice, on another day, that it is not the same one any more. Pure."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planaria.recipe import Dataset

MOST_LISTED = 2000
"""Shards whose names are kept; of more, only a digest is, so that it fits beside every checkpoint."""
MOST_NAMED = 5

Listed = tuple[str, int, int]
"""(name, bytes, samples) of one shard."""


@dataclass(frozen=True)
class DataIdentity:
    """A data set's samples and shards. Folders do not count, so that the data may move; the order of the files does,
    since the order of the samples follows from it."""

    samples: int
    digest: str
    """Of names, sizes and numbers of samples of all shards, in order; empty for data that are made, not read."""
    shards: tuple[Listed, ...] = ()
    """All of them, in order, unless there are more than :data:`MOST_LISTED`."""
    sources: tuple[int, ...] = ()
    """Of a mixture: how many of the shards each source has."""

    def as_tree(self) -> dict[str, Any]:
        """JSON values for the meta data of a checkpoint."""
        return {"samples": self.samples, "digest": self.digest, "shards": [list(shard) for shard in self.shards]} | (
            {"sources": list(self.sources)} if self.sources else {}
        )

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> DataIdentity:
        """The reverse of :meth:`as_tree`.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        shards = tuple((str(name), int(size), int(count)) for name, size, count in tree["shards"])
        sources = tuple(int(count) for count in tree.get("sources", ()))
        return cls(int(tree["samples"]), str(tree["digest"]), shards, sources)


def identity_of(dataset: Dataset) -> DataIdentity:
    """Of an open data set; one whose ``shards`` are no files (:class:`planaria.data.rows.Shard`) is known by its number
    of samples alone."""
    found = shards_of(dataset)
    if found is None:
        return DataIdentity(len(dataset), "")
    listed = [(shard.file.name, shard.file.size, shard.samples) for shard in found]
    digest = hashlib.blake2b(repr(listed).encode(), digest_size=16).hexdigest()
    sources = tuple(len(shards_of(one.dataset) or ()) for one in getattr(dataset, "sources", ()))
    return DataIdentity(len(dataset), digest, tuple(listed) if len(listed) <= MOST_LISTED else (), sources)


def shards_of(dataset: Any) -> Sequence[Any] | None:
    """The files of an open data set, each a :class:`planaria.data.rows.Shard`; None of one that is not read from files.
    A data set of the user's own may mean something else by that name."""
    found = getattr(dataset, "shards", None)
    if isinstance(found, Sequence) and all(hasattr(one, "file") and hasattr(one, "samples") for one in found):
        return found
    return None


def differences(before: DataIdentity, now: DataIdentity) -> list[str]:
    """What has changed, in words; nothing for the same data set."""
    if (before.samples, before.digest) == (now.samples, now.digest):
        return []
    found = []
    if before.shards and now.shards:
        old, new = _by_name(before.shards), _by_name(now.shards)
        found += _named("removed", old.keys() - new.keys())
        found += _named("added", new.keys() - old.keys())
        found += _named("altered", (name for name in old.keys() & new.keys() if old[name] != new[name]))
        if not found:
            found.append("the same shards in another order")
    if before.samples != now.samples:
        found.append(f"{before.samples:,} samples before, {now.samples:,} now")
    return found or ["the shards are others"]


def _by_name(shards: Iterable[Listed]) -> dict[str, Counter[tuple[int, int]]]:
    found: dict[str, Counter[tuple[int, int]]] = {}
    for name, size, samples in shards:
        found.setdefault(name, Counter())[size, samples] += 1
    return found


def _named(what: str, names: Iterable[str]) -> list[str]:
    ordered = sorted(names)
    if not ordered:
        return []
    rest = f" and {len(ordered) - MOST_NAMED} more" if len(ordered) > MOST_NAMED else ""
    return [f"{what}: {', '.join(ordered[:MOST_NAMED])}{rest}"]
