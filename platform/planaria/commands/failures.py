"""From an exception to one clear message and the exit code of the process."""

from __future__ import annotations

import sys
from collections.abc import Callable

from planaria.config import ConfigError
from planaria.data.errors import DataError, DataUnreachable
from planaria.exchange.errors import ExchangeError
from planaria.planner.plan import PlanError
from planaria.state.errors import CheckpointError

FAILED = 1
"""The job, or the check, failed."""
WRONG_INPUT = 2
"""Something that the caller gave cannot be used."""
INTERRUPTED = 130
"""Ended by Ctrl-C: 128 + SIGINT."""
TERMINATED = 143
"""Ended by SIGTERM: 128 + SIGTERM."""


class UsageError(ValueError):
    """The arguments of a command cannot be used together, or name something that is not there."""


def guarded(action: Callable[[], int]) -> int:
    """Exit code of ``action``; an error that its user can mend becomes a message on stderr without a traceback."""
    try:
        return action()
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except Exception as error:
        if not is_mendable(error):
            raise
        complain(str(error))
        return WRONG_INPUT


def is_mendable(error: Exception) -> bool:
    """Whether the message tells the user what to change."""
    known: tuple[type[Exception], ...] = (ConfigError, DataError, DataUnreachable, ExchangeError, PlanError)
    known += (CheckpointError, UsageError)
    # Defined beside torch; who has not imported it cannot have raised it.
    sharding = getattr(sys.modules.get("planaria.engine.tensor_parallel"), "ShardingError", None)
    return isinstance(error, known if sharding is None else (*known, sharding))


def complain(message: str) -> None:
    """Print an error message."""
    encoding = sys.stderr.encoding or "ascii"
    print(f"planaria: {message}".encode(encoding, "replace").decode(encoding), file=sys.stderr, flush=True)
