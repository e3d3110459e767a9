"""Where a job's wall time goes: every instant belongs to exactly one class, so the classes add up to the whole.

The account is a cursor that moves along the controller's clock. What lies behind it has been given to classes; what
lies between it and now belongs, for the time being, to whatever the job is doing. Workers report durations by clocks
of their own: they divide the span between two reports, and can neither add to it nor leave a hole in it.

Time is kept in whole nanoseconds, so that sums stay exact however long the job is.
"""

from __future__ import annotations

import statistics
import threading
from array import array
from collections import deque
from collections.abc import Mapping

RECOVERY = ("detect", "abort", "plan", "form", "build", "restore", "first_step")
"""Phases from a fault to the next step, in order."""
CLASSES = (
    "productive",  # computing steps that count: they were completed, and never rolled back
    "data_wait",  # waiting for the batch of a step
    "checkpoint",  # training stands still while its state is copied or saved
    *(f"recovery_{phase}" for phase in RECOVERY),
    "resize",  # a planned change of workers or layout, from the pause to the first step
    "waiting",  # for resources: there are fewer workers than the job needs
    "startup",  # from the start of the job to its first step
    "evaluation",
    "lost",  # work that had to be done again, or that counted for nothing
    "other",  # between steps, unexplained
    "under_way",  # a step that is not completed yet, so that nobody knows whether it will count
)
UNDER_WAY = "under_way"
FORMING = "forming"
WINDOW = 21
"""Steps over which the usual length of a step is taken."""
LAST = ("finished", "stopped", "failed")


class Account:
    """The account of one job; times are seconds of one monotonic clock, the controller's.

    A time before the latest one counts as the latest one. Calls may come from several threads.
    """

    def __init__(self, now: float) -> None:
        self._lock = threading.Lock()
        self._spent = dict.fromkeys(CLASSES, 0)
        self._began = self._at = _ns(now)
        self._open = "startup"
        """Class of what lies behind the cursor, or FORMING."""
        self._planned = False
        self._started = False
        self._leave = "other"
        """Where the time since the last step goes, if training is left without another one."""
        self._laps: dict[str, int] = {}
        self._closed = False
        self._first = 0
        """Step that the first entry of ``_steps`` is of."""
        self._steps = array("q")
        """Productive time of every step that counts so far: what a rollback takes away."""
        self._broken = 0
        """Of ``lost``: the step that was under way when the last fault came."""
        self._usual: deque[int] = deque(maxlen=WINDOW)
        self._late = 0
        """Time in ``other`` that passed between reports: a report that was late left it, and the next one,
        which then seems to come early, takes it back."""

    # -- what the controller tells -----------------------------------------------------------------

    def enter(self, state: str, now: float) -> None:
        """The job entered a state of the controller; states that say nothing about time are ignored."""
        with self._lock:
            if self._closed:
                return
            if state == "recovering":
                self._fault(_ns(now), _ns(now))
            elif state == "waiting":
                self._settle(_ns(now))
                self._open = "waiting"
            elif state == "forming":
                self._settle(_ns(now))
                self._open = self._preparing("plan")
            elif state in ("resizing", "draining"):
                self._planned, self._leave = True, "resize"
            elif state == "stopping":
                self._leave = "checkpoint"
            elif state in LAST:
                if state == "finished":
                    self._leave = "checkpoint"  # the last one, which the job waits for
                self._settle(_ns(now))
                self._closed = True

    def fault(self, now: float, since: float | None = None) -> None:
        """A fault was found, and the generation is about to be aborted.

        Args:
            now: when it was found.
            since: when the lost or stuck member was last heard of; None: the evidence came at once. The step that
                was under way then is lost; what followed was detection.
        """
        with self._lock:
            if not self._closed:
                self._fault(_ns(now), _ns(now if since is None else since))

    def begin(self, step: int, now: float) -> None:
        """Workers were told to form a generation that goes on from ``step`` completed steps; later ones are undone."""
        with self._lock:
            if self._closed:
                return
            self._settle(_ns(now))
            self._rollback(step)
            self._open, self._laps, self._late, self._leave = FORMING, {}, 0, "other"

    def ready(self, phases: Mapping[str, float]) -> None:
        """A generation is restored; seconds of ``form``, ``build`` and ``restore``, the longest over its ranks."""
        with self._lock:
            self._laps = {phase: max(0, _ns(phases.get(phase, 0.0))) for phase in ("form", "build", "restore")}

    def step(
        self, step: int, step_s: float, data_wait_s: float, snapshot_s: float, now: float, *, counts: bool = True
    ) -> None:
        """Rank 0 completed ``step`` (the first is 0), of which it waited for data and kept its state for so long.

        Args:
            step: its number; a later one that was reported before counts as rolled back.
            step_s: the whole step, the other two included.
            data_wait_s: waiting for the batch.
            snapshot_s: copying or saving the state.
            now: when the report came.
            counts: False if the step changed nothing (its gradient was not finite).
        """
        with self._lock:
            if self._closed:
                return
            took, wait, kept = (max(0, _ns(seconds)) for seconds in (step_s, data_wait_s, snapshot_s))
            if self._open == UNDER_WAY:
                work = self._next_step(self._move(_ns(now)), took, wait, kept)
            elif self._open == "waiting" or self._open.startswith("recovery"):
                work = self._last_step(took, wait, kept)
            else:
                work = self._first_step(self._move(_ns(now)), took, wait, kept)
                self._open, self._started, self._planned = UNDER_WAY, True, False
            self._note(step, work, counts)

    def resume(self, earlier: Mapping[str, float], away_s: float, training: bool) -> None:
        """The controller was lost and has returned: go on with what its account said, ``away_s`` seconds ago.

        That time is unexplained, until steps that were done meanwhile are reported.

        Args:
            earlier: seconds by class.
            training: whether training went on.
        """
        with self._lock:
            for name in CLASSES:
                self._spent["other" if name == UNDER_WAY else name] += max(0, _ns(earlier.get(name, 0.0)))
            away = max(0, _ns(away_s))
            self._spent["other"] += away
            self._late, self._started = away, True
            self._open = UNDER_WAY if training else "recovery_plan"

    def rollback(self, step: int) -> None:
        """Steps from ``step`` on are undone: what was productive in them is lost."""
        with self._lock:
            self._rollback(step)

    def evaluation(self, running: bool, now: float) -> None:
        """An evaluation began or ended; it may be told again and again."""
        with self._lock:
            if self._closed or running == (self._open == "evaluation"):
                return
            self._leave = "checkpoint" if running else self._leave  # what stood between the last step and this
            self._settle(_ns(now))
            self._open = "evaluation" if running else UNDER_WAY

    def view(self, now: float) -> dict[str, float]:
        """Seconds by class up to ``now``, all of :data:`CLASSES`, with ``wall``, their sum, and ``goodput``, the
        productive share of it."""
        with self._lock:
            spent = dict(self._spent)
            if not self._closed:
                for name, span in self._shares(max(0, _ns(now) - self._at)).items():
                    spent[name] += span
            wall = sum(spent.values())
        seconds = {name: span / 1e9 for name, span in spent.items()}
        return seconds | {"wall": wall / 1e9, "goodput": spent["productive"] / wall if wall else 0.0}

    # -- how it is divided -------------------------------------------------------------------------

    def _move(self, now: int) -> int:
        """Move the cursor; the span that it passed."""
        span = max(0, now - self._at)
        self._at += span
        return span

    def _settle(self, now: int) -> None:
        """Give what the cursor passes to what the job was doing."""
        for name, span in self._shares(self._move(now)).items():
            self._spent[self._leave if name == UNDER_WAY else name] += span

    def _shares(self, span: int) -> dict[str, int]:
        """How a span is divided if it ends without a step."""
        if self._open != FORMING:
            return {self._open: span}
        if self._preparing("form") != "recovery_form":
            return {self._preparing("form"): span}
        if not self._laps:
            return {"recovery_form": span}
        shares = {}
        for phase, lap in self._laps.items():
            shares[f"recovery_{phase}"] = min(lap, span)
            span -= min(lap, span)
        return shares | {"recovery_first_step": span}

    def _preparing(self, phase: str) -> str:
        if not self._started:
            return "startup"
        return "resize" if self._planned else f"recovery_{phase}"

    def _fault(self, now: int, since: int) -> None:
        if self._open == "recovery_abort":
            return
        self._leave = "lost"
        if self._open == "evaluation":
            self._open = UNDER_WAY  # it will be done again
        lost = self._spent["lost"]
        self._settle(min(since, now))
        self._broken = self._spent["lost"] - lost
        self._spent["recovery_detect"] += self._move(now)
        self._open, self._planned, self._started = "recovery_abort", False, True

    def _first_step(self, span: int, took: int, wait: int, kept: int) -> int:
        """Divide the span from the order to the end of the first step; returns the productive part.

        What the step took beyond the usual (memory is allocated, code is loaded) belongs to getting there, and so
        does the wait for its batch.
        """
        busy = max(0, took - wait - kept)
        work = min(busy, span, int(statistics.median_low(self._usual)) if self._usual else busy)
        kept = min(kept, span - work)
        self._spent["checkpoint"] += kept
        for name, share in self._shares(span - work - kept).items():
            self._spent[name] += share
        return work

    def _next_step(self, span: int, took: int, wait: int, kept: int) -> int:
        """Divide the span between two reports; returns the productive part."""
        back = min(self._late, max(0, took - span))
        idle = max(0, span - took)
        self._late += idle - back
        self._spent["other"] += idle - back
        body = span - idle + back
        if took > body:  # it cannot have been so long by this clock
            wait, kept = wait * body // took, kept * body // took
        wait = min(wait, body)
        kept = min(kept, body - wait)
        self._spent["data_wait"] += wait
        self._spent["checkpoint"] += kept
        work = body - wait - kept
        self._usual.append(work)
        return work

    def _last_step(self, took: int, wait: int, kept: int) -> int:
        """A step was completed after all, though the news of it came behind that of a fault; returns what of the
        step that seemed to be broken off is productive."""
        work = min(max(0, took - wait - kept), self._broken)
        self._broken -= work
        self._spent["lost"] -= work
        return work

    def _note(self, step: int, work: int, counts: bool) -> None:
        self._rollback(step)
        self._steps.append(work if counts else 0)
        self._spent["productive" if counts else "lost"] += work

    def _rollback(self, step: int) -> None:
        """``step`` is the next one to be noted."""
        keep = step - self._first
        undone = sum(self._steps[max(0, keep) :])
        self._spent["productive"] -= undone
        self._spent["lost"] += undone
        del self._steps[max(0, keep) :]
        if not self._steps:
            self._first = step
        elif keep > len(self._steps):
            self._steps.frombytes(bytes(8 * (keep - len(self._steps))))  # done, but never reported


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
