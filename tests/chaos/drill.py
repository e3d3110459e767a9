"""Carries a fault script out against the running job."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tests.chaos.fault import Blow, Fault
from tests.chaos.growth import Growth
from tests.chaos.script import Act
from tests.chaos.stage import Stage, actors
from tests.chaos.times import Times
from tests.support.running import Trouble

MEMBERS = ("Worker", "KeeperActor", "Loader")
"""Classes of the job's actors, the controller aside."""
CALM_LIMIT_S = 150.0
"""Longest time until the job trains again before the next fault."""


class Drill:
    """The faults of a script, one after another; what was seen is in ``times`` and ``growth``.

    Args:
        stage: the running job.
        driver: process id of the job's command.
        say: prints a line.
    """

    def __init__(self, stage: Stage, driver: int, say: Callable[[str], None]) -> None:
        self.stage, self.driver, self._say = stage, driver, say
        self.times, self.growth = Times(), Growth()

    def run(self, script: Sequence[Act]) -> None:
        """Carry it out.

        Raises:
            Trouble: the job did not get over a fault, or ended; the text says at which, and replays it.
        """
        for number, act in enumerate(script):
            try:
                self._act(number, act)
            except AssertionError as error:
                raise Trouble(f"fault {number}, {act.fault}: {error}\n{self.stage.excerpt()}") from error
        self.settle()

    def settle(self) -> None:
        """Wait until the job trains and nobody is on the way any more, and look at all processes."""
        self._calm()
        seen = self.stage.generation, self.stage.step
        self.stage.until(
            lambda: self.stage.calm() and self.stage.step >= seen[1] + 5, CALM_LIMIT_S, "five undisturbed steps"
        )
        self._sample()

    def strangers(self) -> dict[int, str]:
        """Actors that run but are no members of the job (any more)."""
        known = set(self.stage.living().values())
        return {pid: title for pid, title in actors(*MEMBERS).items() if pid not in known}

    def _calm(self) -> None:
        self.stage.until(self.stage.calm, CALM_LIMIT_S, "the job to train")

    def _act(self, number: int, act: Act) -> None:
        stage, fault = self.stage, act.fault
        self._calm()
        self._sample()
        pause = time.monotonic() + act.pause_s
        stage.until(lambda: time.monotonic() >= pause, CALM_LIMIT_S, "the pause before it")
        self._calm()
        step = stage.step
        blow = fault.strike(stage)
        stage.until(lambda: fault.over(stage, blow), fault.limit_s, f"the end of {fault} at step {step}")
        fault.finish(stage, blow)
        self._note(number, fault, blow, step)

    def _note(self, number: int, fault: Fault, blow: Blow, step: int) -> None:
        if blow.resumed_at is None:
            self._say(f"{number:>4} step {step:>5} {fault}: {blow.note or 'over'}")
            return
        outside = blow.resumed_at - (blow.last_at or blow.at)
        news = [event for event in self.stage.recovered if event["time"] >= blow.at and event["gen"] > blow.generation]
        own = news[-1] if news and blow.breaks else None
        self.times.add(fault.kind, outside, own and own["seconds"], own["phases"] if own else {})
        layout = self.stage.generations[-1]["layout"]
        inside = f", by its record {own['seconds']:.2f} s" if own else ""
        self._say(f"{number:>4} step {step:>5} {fault}: next step after {outside:.2f} s{inside}; {layout}")

    def _sample(self) -> None:
        roles = {pid: member.partition("-")[0] for member, pid in self.stage.living().items()}
        roles |= {self.driver: "driver", self.stage.controller(): "controller"}
        self.growth.sample(roles, self.stage.generation, self.stage.generations[-1]["layout"])
