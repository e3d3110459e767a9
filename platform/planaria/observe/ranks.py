"""What every rank did, added up between two rows of ``ranks.jsonl``: for the report, not for the policies."""

from __future__ import annotations

from typing import Any

EVERY_S = 10.0
"""Rows come this far apart ..."""
FIELDS = 5
RANK_S = 0.1
"""... or this long per rank, whichever is longer: a row of a large fleet is long."""


class RankLog:
    """Sums over the ranks of one generation; times are seconds of one monotonic clock."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._ranks: dict[int, list[float]] = {}
        self._told: dict[int, tuple[int, int]] = {}
        """The last (generation, step) of every rank."""

    def step(self, generation: int, step: int, rank: int, compute_s: float | None, data_wait_s: float) -> None:
        """A rank completed a step: how long it computed, waits for peers left out (None: not measured, as on most steps
        of a GPU), and how long it waited for its batch. A step that it says again counts once."""
        if (generation, step) <= self._told.get(rank, (0, -1)):
            return
        self._told[rank] = generation, step
        held = self._of(rank)
        held[0] += 1
        held[3] += data_wait_s
        if compute_s is not None:
            held[1] += 1
            held[2] += compute_s

    def samples(self, rank: int, count: int) -> None:
        """A rank consumed samples; ranks that share a replica consume the same ones."""
        self._of(rank)[4] += count

    def due(self, now: float) -> bool:
        """Whether it is time for a row."""
        return now - self._since >= max(EVERY_S, RANK_S * len(self._ranks))

    def take(self, generation: int, now: float) -> dict[str, Any] | None:
        """The row since the last one, which begins anew; None if nothing was done.

        ``ranks``: [steps, steps whose computing was measured, its seconds, seconds of waiting for data, samples] by
        rank; ``seconds``: the time that the row covers.
        """
        ranks = {}
        for rank, (steps, measured, computed, waited, samples) in sorted(self._ranks.items()):
            ranks[str(rank)] = [int(steps), int(measured), round(computed, 4), round(waited, 4), int(samples)]
        seconds, self._since, self._ranks = now - self._since, now, {}
        return {"gen": generation, "seconds": round(seconds, 4), "ranks": ranks} if ranks else None

    def _of(self, rank: int) -> list[float]:
        return self._ranks.setdefault(rank, [0.0] * FIELDS)
