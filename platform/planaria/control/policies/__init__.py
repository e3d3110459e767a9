"""What to do: pure functions over plain records, one idea per file.

The controller asks, gets a small frozen dataclass back, and acts. Nothing here knows Ray, torch, clocks or threads:
times come in as ``now`` (monotonic seconds) or as elapsed seconds.
"""

from planaria.control.policies.decisions import GiveUp, Keep, Pause
from planaria.control.policies.failure import Continue, Failure, FailurePolicy, Generation, UserError
from planaria.control.policies.resize import Calm, Grow, growths_undone, resize, settle_time
from planaria.control.policies.waiting import Start, Wait, wait

__all__ = [
    "Calm",
    "Continue",
    "Failure",
    "FailurePolicy",
    "Generation",
    "GiveUp",
    "Grow",
    "Keep",
    "Pause",
    "Start",
    "UserError",
    "Wait",
    "growths_undone",
    "resize",
    "settle_time",
    "wait",
]
