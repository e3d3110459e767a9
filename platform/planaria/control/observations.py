"""What the controller has seen of a job's health: the input of its policies, gathered from the workers' words. Pure:
times come in, nothing is read from a clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from planaria.config import JobConfig
from planaria.control.generation import Generation
from planaria.control.policies.decisions import GiveUp
from planaria.control.policies.hang import Hang, HangLimits, Word, again, watch
from planaria.control.policies.numerics import Proceed, RollBack, judge_steps
from planaria.control.policies.resize import Calm, growths_undone, settle_time
from planaria.control.policies.straggler import Standing, judge

RECENT = 50
"""Steps whose times are remembered."""
WINDOW = 10
"""Steps of one look at who is slow."""
HANGS = 8
"""Hangs that are remembered, to recognise one that comes again."""

Message = dict[str, Any]


@dataclass
class Observations:
    """Of one job, over all of its generations."""

    job: JobConfig
    step_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    """Recent step times, without the first step of any generation."""
    standing: Standing = field(default_factory=Standing)
    """Who is slow."""
    rollbacks: list[RollBack] = field(default_factory=list)
    _words: dict[str, Word] = field(default_factory=dict)
    _hangs: deque[Hang] = field(default_factory=lambda: deque(maxlen=HANGS))
    _compute: dict[int, list[float]] = field(default_factory=dict)
    _skipped: set[int] = field(default_factory=set)
    _change_s: float = 0.0
    """How long the last change of members took."""
    _grown_at: float | None = None
    _stays: list[float] = field(default_factory=list)
    _more_since: float | None = None

    def heard(self, ident: str, node: str, generation: Generation, message: Message, now: float) -> None:
        """A member of the generation that runs said something."""
        kind = message["t"]
        if kind == "phase":
            micro, phase = message.get("micro", 0), message["phase"]
            self._words[ident] = Word(ident, node, generation.number, message["step"], phase, now, micro)
        elif kind == "ready":
            self._words[ident] = Word(ident, node, generation.number, message["step"], "data", now)
        elif kind == "step":
            self._words[ident] = Word(ident, node, generation.number, message["step"] + 1, "data", now)
            self._timed(generation, message)

    def _timed(self, generation: Generation, message: Message) -> None:
        if message["step"] == generation.start_step:
            return
        rank = message["rank"]
        if message["compute_s"] is not None:  # on a GPU it is measured now and then
            self._compute.setdefault(rank, []).append(message["compute_s"])
        if rank == 0:
            self.step_s.append(message["step_s"])
            self._skipped.discard(message["step"])
            # An overflow of the loss scale is the ordinary search for one, and ends by itself.
            if message["skipped"] and not message["overflow"]:
                self._skipped.add(message["step"])

    # -- hangs -------------------------------------------------------------------------------------

    def hang(self, generation: Generation, silence: Callable[[str], float | None], now: float) -> Hang | None:
        """Whether the generation hangs, and who is to blame.

        Args:
            generation: the one that runs.
            silence: seconds since a member's last heartbeat; None if that is not known.
            now: monotonic seconds.
        """
        words = {}
        for rank, ident in enumerate(generation.members):
            if ident in generation.pending:
                node = generation.nodes[rank]
                word = self._words.get(ident) or Word(ident, node, 0, 0, "forming", generation.began_at)
                quiet = silence(ident)
                words[rank] = replace(word, beat=now - quiet) if quiet is not None else replace(word, beat=now)
        first = generation.first_step_at is None
        began, limits = generation.began_at, HangLimits.of(self.job)
        found = watch(words, generation.number, began, self.step_s, first, now, limits)
        if found is None:
            return None
        found = again(found, self._hangs, words)
        self._hangs.append(found)
        return found

    # -- stragglers --------------------------------------------------------------------------------

    def slow(self, generation: Generation) -> Standing | None:
        """Who is slow, once a window is full; None in between."""
        nodes, members = dict(enumerate(generation.nodes)), dict(enumerate(generation.members))
        if len(nodes) < 2 or any(len(self._compute.get(rank, ())) < WINDOW for rank in nodes):
            return None
        times, self._compute = self._compute, {}
        layout = generation.plan.layout
        stages = {rank: layout.coords(rank)["pp"] for rank in nodes}
        self.standing = judge(times, nodes, self.standing, self.job.elastic.straggler_ratio, members, stages)
        return self.standing

    # -- numerical faults --------------------------------------------------------------------------

    def numbers(self, done: int, states: Iterable[int]) -> Proceed | RollBack | GiveUp:
        """What to do about steps that changed nothing since their gradients were not finite.

        Args:
            done: steps done.
            states: what could be gone back to.
        """
        decision = judge_steps(self._skipped, done, self.job.elastic.bad_steps, states, self.rollbacks)
        if isinstance(decision, RollBack):
            self.rollbacks.append(decision)
            self._skipped.clear()
        return decision

    # -- size --------------------------------------------------------------------------------------

    def changed(self, generation: Generation, *, grown: bool, now: float) -> None:
        """A generation completed its first step."""
        self._compute.clear()
        self._change_s = generation.recovery_s or self._change_s
        self._more_since = None
        if grown:
            self._grown_at = now

    def shrunk(self, now: float) -> None:
        """A worker was lost."""
        if self._grown_at is not None:
            self._stays.append(now - self._grown_at)
            self._grown_at = None

    def calm(self, quiet_s: float, more: bool, now: float) -> Calm:
        """How calm the set of ready workers is.

        Args:
            quiet_s: seconds since it last changed.
            more: whether more workers could be used than are.
            now: monotonic seconds.
        """
        self._more_since = (self._more_since or now) if more else None
        undone = growths_undone(self._stays, self._change_s)
        waiting = 0.0 if self._more_since is None else now - self._more_since
        return Calm(quiet_s, waiting, settle_time(self.job.elastic.settle_s, self._change_s, undone))
