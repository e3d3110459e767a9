"""What the ranks of a generation have consumed, until it is known that a step counts. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Consumed:
    """What one step consumed, all ranks together."""

    ids: list[int]
    """In the order of the batch."""
    tokens: int
    missing: list[int]
    """Data-parallel ranks that did not tell: they died with their word on the way."""


@dataclass
class Shares:
    """By step and data-parallel rank. A rank tells its share before it computes the step, so that whoever completes a
    step has told long before."""

    _by_step: dict[int, dict[int, tuple[list[int], int]]] = field(default_factory=dict)

    def note(self, step: int, dp_rank: int, ids: list[int], tokens: int) -> None:
        """A rank is about to consume its share of a step."""
        self._by_step.setdefault(step, {})[dp_rank] = (ids, tokens)

    def complete(self, step: int, dp: int) -> bool:
        """Whether all of ``dp`` ranks have told of ``step``."""
        return len(self._by_step.get(step, ())) == dp

    def take(self, step: int, dp: int) -> Consumed:
        """What is known of ``step``, which is then forgotten, with all before it."""
        told = self._by_step.get(step, {})
        for old in [known for known in self._by_step if known <= step]:
            del self._by_step[old]
        ids = [index for rank in sorted(told) for index in told[rank][0]]
        missing = [rank for rank in range(dp) if rank not in told]
        return Consumed(ids, sum(tokens for _, tokens in told.values()), missing)
