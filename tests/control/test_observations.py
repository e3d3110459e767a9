"""What the controller concludes from the steps that it hears of."""

from __future__ import annotations

from typing import Any

from planaria.config import parse
from planaria.control.generation import Generation
from planaria.control.observations import Observations
from planaria.control.policies.numerics import Proceed, RollBack
from planaria.layout import Layout
from planaria.planner.plan import Plan

LIMIT = 3
JOB = parse({"train": {"steps": 99, "global_batch": 2}, "elastic": {"bad_steps": LIMIT}})


def _after(*steps: dict[str, Any]) -> Proceed | RollBack:
    """The decision after these steps, from step 1 on, with a state of step 1 to go back to."""
    seen = Observations(JOB)
    generation = Generation(1, Plan(Layout(), ("a",), (), ""), "start", True, 0)
    for number, step in enumerate(steps, 1):
        message = {"t": "step", "rank": 0, "step": number, "step_s": 0.1, "compute_s": None}
        seen.heard("a", "node", generation, message | {"skipped": False, "overflow": False} | step, 0.0)
    decision = seen.numbers(len(steps) + 1, [1])
    assert isinstance(decision, Proceed | RollBack)
    return decision


FAULT = {"skipped": True}
OVERFLOW = {"skipped": True, "overflow": True}


def test_the_search_for_a_loss_scale_never_rolls_back() -> None:
    assert _after(*[OVERFLOW] * 4 * LIMIT) == Proceed(0)


def test_faults_in_a_row_do_also_at_the_end_of_a_search() -> None:
    assert _after(*[FAULT] * LIMIT) == RollBack(1, 1, LIMIT)
    assert _after(OVERFLOW, *[FAULT] * LIMIT) == RollBack(1, 2, LIMIT + 1)
    assert _after(FAULT, FAULT, OVERFLOW, FAULT) == Proceed(1)
