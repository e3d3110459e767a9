"""Hangs: nobody gets ahead any more. Whether that is so, and who is to blame.

Every rank sends a heartbeat and a *word*: where it is. In a hang most ranks are innocent, since they wait for one that
is stuck. So what counts is the rank that is furthest behind: while its word is young, the others have a reason to
wait, however long they have done so.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from planaria.config import JobConfig
from planaria.runtime.progress import BEFORE, WITHIN

LONG = frozenset({"checkpoint", "evaluate"})
"""Phases that take no share of a step, and whose length step times do not tell."""

FACTOR = 10.0
"""A phase may take this many times the median step: a slow node, or half as many nodes, are no hang."""
FLOOR_S = 10.0
"""Shorter limits would take a pause of the machine for a hang."""
RESTORE_S = 1800.0
"""Building and loading a large model takes long, in silence."""
FEWEST = 5
"""Steps to have been measured before their times count."""
DATA_TRIES = 2.5
"""After ``data.timeout_s`` another loader is asked; a rank is stuck in data when that did not help either."""


@dataclass(frozen=True)
class Word:
    """The newest that was heard of a rank."""

    member: str
    node: str
    generation: int
    step: int
    """Steps done, so the 0-based step that is under way."""
    phase: str
    at: float
    """When it came there; monotonic seconds, by the controller's clock."""
    micro: int = 0
    """Micro-batches done in this phase."""
    beat: float = 0.0
    """When its last heartbeat came; a word is one, too."""

    @property
    def place(self) -> tuple[bool, int, int, int]:
        """How far it is; greater is further. A phase that is not known counts as the first of its step."""
        if self.phase in BEFORE:
            return False, self.step, BEFORE.index(self.phase), self.micro
        return True, self.step, WITHIN.index(self.phase) if self.phase in WITHIN else 0, self.micro

    @property
    def seat(self) -> tuple[str, str]:
        """The process and its node."""
        return self.member, self.node

    def __str__(self) -> str:
        return f"{self.phase} of step {self.step}" + (f", micro-batch {self.micro}" if self.micro else "")


@dataclass(frozen=True)
class HangLimits:
    """Seconds that a rank may stay at one place."""

    silence_s: float
    """Without any heartbeat."""
    ceiling_s: float
    """Anywhere within training, and while groups form."""
    data_s: float
    """In phase ``data``, at the least: as long as it takes to ask several loaders."""
    floor_s: float = FLOOR_S
    restore_s: float = RESTORE_S

    @classmethod
    def of(cls, job: JobConfig) -> HangLimits:
        """From the job's description."""
        elastic = job.elastic
        return cls(
            elastic.silence_s,
            elastic.hang_s,
            min(DATA_TRIES * job.data.timeout_s, elastic.hang_s),
            min(FLOOR_S, elastic.hang_s),
            max(RESTORE_S, elastic.hang_s),
        )

    def of_phase(self, phase: str, step_s: Sequence[float], first: bool) -> float:
        """The limit of a phase, in seconds.

        Args:
            phase: where the rank is.
            step_s: recent step times, of earlier generations too, but of no generation's first step: that one
                compiles, connects and allocates.
            first: whether the generation has yet to complete its first step.
        """
        if phase in ("building", "restoring"):
            return self.restore_s
        if first or phase in LONG or phase in BEFORE or len(step_s) < FEWEST:
            return self.ceiling_s
        usual = min(max(FACTOR * statistics.median(step_s), self.floor_s), self.ceiling_s)
        return max(usual, self.data_s) if phase == "data" else usual


@dataclass(frozen=True)
class Hang:
    """A generation that gets no further. All of its ranks are to be aborted; the culprits are to be removed, too."""

    culprits: tuple[int, ...]
    """Ranks; none where nobody stands out."""
    why: str
    kind: str
    """``silent``, ``behind`` or ``deadlock``."""
    phase: str
    step: int
    """Where the culprits, or all, are stuck."""
    seats: frozenset[tuple[str, str]]
    """(member, node) of all ranks that are stuck at that place."""


def watch(
    words: Mapping[int, Word],
    generation: int,
    began: float,
    step_s: Sequence[float],
    first: bool,
    now: float,
    limits: HangLimits,
) -> Hang | None:
    """Whether a generation hangs.

    * Ranks without a heartbeat for ``silence_s`` are to blame first, unless all are silent: then rather the line to
      them, or the controller itself, was held up.
    * Else, if whoever is furthest behind has been there for longer than the phase's limit, it hangs. Those are to
      blame if they are no more than half of the ranks: they stand still and the others wait for them. Where more
      are behind, the few that are ahead only left the broken collective first.

    Args:
        words: by rank, of all ranks that have not returned. A word of an earlier generation counts as: not begun.
        generation: number of the one that runs.
        began: when it began; monotonic seconds.
        step_s: recent step times in seconds; see :meth:`HangLimits.of_phase`.
        first: whether it has yet to complete its first step.
        now: monotonic seconds.
        limits: how long is too long.
    """
    if not words:
        return None
    silent = [rank for rank, word in words.items() if now - max(word.beat, word.at, began) > limits.silence_s]
    if silent:
        return _silent(sorted(silent), words, now, limits)

    current = {rank: _current(word, generation, began) for rank, word in words.items()}
    least = min(word.place for word in current.values())
    behind = sorted(rank for rank, word in current.items() if word.place == least)
    # One of them may have come there late, and may get on.
    youngest = current[max(behind, key=lambda rank: current[rank].at)]
    age, limit = now - youngest.at, limits.of_phase(youngest.phase, step_s, first)
    if age <= limit:
        return None
    seats = frozenset(current[rank].seat for rank in behind)
    told = f"{age:.0f} s without progress (limit {limit:.0f} s)"
    if len(behind) < len(words) and 2 * len(behind) <= len(words):
        names = ", ".join(f"rank {rank} ({current[rank].member} on {current[rank].node[:8]})" for rank in behind)
        why = f"{names} stuck in {youngest}: {told}"
        return Hang(tuple(behind), why, "behind", youngest.phase, youngest.step, seats)
    where = f"all ranks in {youngest}" if len(behind) == len(words) else f"{len(behind)} ranks in {youngest}"
    return Hang((), f"{where}: {told}", "deadlock", youngest.phase, youngest.step, seats)


def again(hang: Hang, earlier: Iterable[Hang], words: Mapping[int, Word]) -> Hang:
    """``hang``, with a culprit where an earlier one of the same kind at the same place gives it away.

    The first deadlock blames nobody. If the next generation hangs at the same step and phase, and exactly one process
    on one node was stuck in both, then it is that one.

    Args:
        hang: the newest.
        earlier: those before it.
        words: what ``hang`` was found in.
    """
    if hang.culprits:
        return hang
    for before in earlier:
        if (before.kind, before.step, before.phase) != (hang.kind, hang.step, hang.phase):
            continue
        common = before.seats & hang.seats
        if len(common) == 1:
            culprits = tuple(sorted(rank for rank, word in words.items() if word.seat in common))
            ((member, node),) = common
            why = f"{hang.why}; {member} on {node[:8]} alone was part of the same hang before"
            return Hang(culprits, why, hang.kind, hang.phase, hang.step, hang.seats)
    return hang


def _current(word: Word, generation: int, began: float) -> Word:
    if word.generation == generation:
        return word
    return Word(word.member, word.node, generation, 0, "forming", began, 0, word.beat)


def _silent(silent: list[int], words: Mapping[int, Word], now: float, limits: HangLimits) -> Hang:
    longest = max(silent, key=lambda rank: now - max(words[rank].beat, words[rank].at))
    word = words[longest]
    seats = frozenset(words[rank].seat for rank in silent)
    if len(silent) == len(words):
        why = f"no rank has said anything for {limits.silence_s:g} s"
        return Hang((), why, "silent", word.phase, word.step, seats)
    names = ", ".join(f"rank {rank} ({words[rank].member} on {words[rank].node[:8]})" for rank in silent)
    why = f"{names} silent for more than {limits.silence_s:g} s, last heard in {word}"
    return Hang(tuple(silent), why, "silent", word.phase, word.step, seats)
