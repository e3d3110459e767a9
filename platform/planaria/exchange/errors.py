"""What can go wrong between a checkpoint and the world outside. Imports nothing."""

from __future__ import annotations

from collections.abc import Sequence

SHOWN = 8
"""Names that an error lists of each kind."""


class ExchangeError(ValueError):
    """Something given for an export or import cannot be used; the message says what, where and how to mend it."""


def some(names: Sequence[str]) -> str:
    """``names`` in a sentence, many of them shortened."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
