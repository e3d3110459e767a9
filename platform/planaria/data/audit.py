"""Whether a run consumed what it should have: every sample once per epoch, over all failures and resizes. Pure.

What it should have consumed follows from seed, sizes and step alone (:mod:`planaria.data.order`). What it did consume
was told by the ranks, step by step, from the batches that they trained on; the ledger holds it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from planaria.data.order import candidate, indices
from planaria.data.skips import Windows, batch_of

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Course:
    """What a run's samples follow from."""

    samples: int
    """Of the data set."""
    global_batch: int
    seed: int
    shuffle: bool
    windows: Windows = ()
    """Batches that training leaves out."""
    damaged: Mapping[int, int] = field(default_factory=dict)
    """By position of the global order: how many samples were found damaged there, the substitutes included."""

    def expected(self, step: int) -> list[int]:
        """Dataset indices that ``step`` should consume, substitutes included, in the order of positions."""
        first = batch_of(step, self.windows) * self.global_batch
        found = indices(first, first + self.global_batch, self.samples, self.seed, self.shuffle)
        for place in range(self.global_batch):
            if attempts := self.damaged.get(first + place):
                found[place] = candidate(first + place, attempts, self.samples, self.seed, self.shuffle)
        return found


@dataclass(frozen=True)
class Difference:
    """A step that did not consume what it should have."""

    step: int
    missed: list[int]
    """Dataset indices, each as often as it lacks; empty where the ledger holds digests."""
    surplus: list[int]


@dataclass(frozen=True)
class Audit:
    """What the ledger proves."""

    steps: int
    """Steps whose samples are known."""
    consumed: int
    """Samples in them."""
    redone: int
    """Executions that do not count: a later one of the same step does, or training went back before it."""
    differences: list[Difference]
    unknown: list[int]
    """Steps without a record, or of which a rank's share is not recorded."""
    epochs: float
    substitutes: int

    @property
    def proven(self) -> bool:
        """Whether every step consumed exactly what it should have."""
        return self.steps > 0 and not self.differences and not self.unknown


def set_digest(ids: Iterable[int]) -> str:
    """A digest of a multiset of ids: the same in whatever order, and by whatever ranks, they were consumed."""
    total = 0
    for index in ids:
        total += int.from_bytes(hashlib.blake2b(str(index).encode(), digest_size=16).digest(), "big")
    return f"{total % (1 << 128):032x}"


def last_executions(rows: Iterable[Row]) -> tuple[dict[int, Row], int]:
    """(row by step, executions that do not count). A step that is executed undoes itself and all steps after it."""
    kept: dict[int, Row] = {}
    undone = 0
    for row in rows:
        step = row["step"]
        if kept and step <= next(reversed(kept)):
            stale = [known for known in kept if known >= step]
            undone += len(stale)
            for known in stale:
                del kept[known]
        kept[step] = row
    return kept, undone


def audit(rows: Iterable[Row], course: Course) -> Audit:
    """Compare the ledger's ``rows``, in the order in which they were written, with what should have been.

    Args:
        rows: ``step``, and ``ids`` or (``count``, ``digest``); ``missing`` where a share is not known.
        course: what the samples follow from.
    """
    kept, undone = last_executions(rows)
    differences: list[Difference] = []
    unknown = [step for step in range(max(kept, default=-1) + 1) if step not in kept or kept[step].get("missing")]
    consumed = substitutes = 0
    for step, row in kept.items():
        if row.get("missing"):
            continue
        expected = course.expected(step)
        first = batch_of(step, course.windows) * course.global_batch
        substitutes += sum(first + place in course.damaged for place in range(course.global_batch))
        if "ids" in row:
            consumed += len(row["ids"])
            found: Counter[int] = Counter(row["ids"])
            wanted = Counter(expected)
            if found != wanted:
                missed, surplus = (sorted(some.elements()) for some in (wanted - found, found - wanted))
                differences.append(Difference(step, missed, surplus))
        else:
            consumed += row["count"]
            if (row["count"], row["digest"]) != (len(expected), set_digest(expected)):
                differences.append(Difference(step, [], []))
    return Audit(
        steps=len(kept) - sum(bool(row.get("missing")) for row in kept.values()),
        consumed=consumed,
        redone=undone,
        differences=differences,
        unknown=unknown,
        epochs=consumed / course.samples,
        substitutes=substitutes,
    )
